#!/usr/bin/env bash
# Two processes on this machine train one model; where one is lost, both are started again and go on.
#
#   examples/two_processes.sh --config configs/smoke.py --out runs/two
#
# Each has one CPU device. For two GPUs give each process its own: CUDA_VISIBLE_DEVICES=$process, and leave out
# JAX_PLATFORMS. All flags are those of train.py; --out is needed, because both go on from its checkpoints.
set -u
cd "$(dirname "$0")/.."
out=$(printf '%s\n' "$@" | sed -n '/^--out$/{n;p;q}')
: "${out:?give --out FOLDER}"
python=${PYTHON:-python}
tries=${TRIES:-5}

for try in $(seq "$tries"); do
  again=()
  if [ "$try" -gt 1 ]; then
    if [ -f "$out/config.json" ]; then again=(--resume); fi  # also where it was lost before its first checkpoint
  fi
  port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  pids=()
  for process in 0 1; do
    JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} "$python" train.py "$@" ${again[@]+"${again[@]}"} \
      --coordinator "127.0.0.1:$port" --process-id "$process" --num-processes 2 &
    pids+=($!)
  done
  trap 'kill -TERM "${pids[@]}" 2> /dev/null' INT TERM
  statuses=()
  for pid in "${pids[@]}"; do
    wait "$pid"; status=$?
    # A signal to this script ends the wait, not the process.
    while kill -0 "$pid" 2> /dev/null; do wait "$pid"; status=$?; done
    statuses+=("$status")
  done
  case " ${statuses[*]} " in
    " 0 0 ") exit 0 ;;
    *" 75 "*) echo "a process was lost (${statuses[*]}), try $try of $tries" >&2 ;;  # the others say 75
    *) exit "${statuses[0]}" ;;  # an error, or a signal that both obeyed
  esac
done
exit 75
