#!/usr/bin/env bash
# A Cloud TPU slice of several hosts; JAX finds the others by what the TPU's metadata say.
#
#   ZONE=us-west4-a TYPE=v5litepod-16 NAME=transformer examples/cloud_tpu.sh --config modern --mesh data=-1,fsdp=4
#
# SHARED is a folder that all hosts mount, such as a Filestore share; the run goes there. Not run by its authors: adapt
# it to your project.
set -eu
: "${NAME:=transformer}" "${ZONE:=us-west4-a}" "${TYPE:=v5litepod-16}" "${VERSION:=v2-alpha-tpuv5-lite}"
: "${SHARED:=/mnt/shared}" "${REPOSITORY:?a git URL of this project that the hosts can read}"

on_all_hosts() { gcloud compute tpus tpu-vm ssh "$NAME" --zone "$ZONE" --worker=all --command "$1"; }

gcloud compute tpus tpu-vm describe "$NAME" --zone "$ZONE" > /dev/null 2>&1 ||
  gcloud compute tpus tpu-vm create "$NAME" --zone "$ZONE" --accelerator-type "$TYPE" --version "$VERSION"
on_all_hosts "test -d '$SHARED' || { echo '$SHARED is not mounted' >&2; exit 2; }"
on_all_hosts "test -d transformer || git clone '$REPOSITORY' transformer; cd transformer && pip install -e '.[data,tpu]'"

flags=$(printf '%q ' "$@")
for try in 1 2 3 4 5; do
  # The same command on all hosts; whether there is something to go on with, they see on the disk that they share.
  on_all_hosts "cd transformer && resume=; [ -f '$SHARED/run/config.json' ] && resume=--resume
    python3 train.py $flags --out '$SHARED/run' \$resume --join-timeout 300" && exit 0
  echo "the run ended before its end, try $try of 5" >&2
done
exit 1
