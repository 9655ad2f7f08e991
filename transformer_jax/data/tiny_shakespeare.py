"""tiny Shakespeare through TensorFlow Datasets, without TensorFlow.

The builder that comes with TFDS reads its file with TensorFlow and writes TFRecords. This one has the same source,
checksum and splits, and needs neither. Import this module only when the corpus is wanted: it imports TFDS.
"""

import contextlib
import hashlib
import io
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import tensorflow_datasets as tfds

from transformer_jax.errors import DataError

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
CHARACTERS = 1_115_394
SPLITS = ("train", "validation", "test")

_PROBE_SECONDS = 5.0


# TFDS finds checksums.tsv beside this file, and names the dataset after the class. The name differs from TFDS's own,
# so that TFRecords prepared by that one are never mistaken for ours.
class TinyShakespeareArrayRecord(tfds.core.GeneratorBasedBuilder):
    """One example per split, as in TFDS's `tiny_shakespeare`: the first 90 %, then the two halves of the rest."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features, homepage=URL)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        text = dl_manager.download(URL).read_text(encoding="utf-8")
        validation = int(len(text) * 0.9)
        test = validation + int((len(text) - validation) * 0.5)
        parts = (text[:validation], text[validation:test], text[test:])
        return {split: self._generate_examples(part) for split, part in zip(SPLITS, parts, strict=True)}

    def _generate_examples(self, text: str) -> Iterator[tuple[str, dict[str, str]]]:
        yield "text", {"text": text}


def data_dir() -> Path:
    """Where TFDS keeps its datasets: $TFDS_DATA_DIR, or ~/tensorflow_datasets."""
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def load() -> str:
    """Read the whole text: the three splits joined. Download and prepare the dataset where that was not done yet.

    Raises:
      DataError: Where the text is neither prepared, nor at hand as a file, nor to be downloaded; where the folder
        cannot be written; and where the file has other content.
    """
    folder = data_dir()
    try:
        text = _read_prepared(folder)
        if text is None:
            _check_source(folder)
            _prepare(folder)
            text = _read_prepared(folder)
    except OSError as error:
        raise DataError(
            f"tiny_shakespeare cannot be kept in {folder}: {_one_line(error)}; "
            "set TFDS_DATA_DIR to a folder that can be written"
        ) from error
    if text is None:
        name = TinyShakespeareArrayRecord.name
        raise DataError(
            f"tiny_shakespeare was prepared in {folder} and its text is not the expected one (SHA-256 {SHA256}): "
            f"delete {folder / name} and {folder / 'downloads' / name}, and try again"
        )
    return text


def _builder(folder: Path) -> TinyShakespeareArrayRecord:
    return TinyShakespeareArrayRecord(data_dir=folder, file_format="array_record")


def _dataset_folder(folder: Path) -> Path:
    return folder / TinyShakespeareArrayRecord.name / str(TinyShakespeareArrayRecord.VERSION)


def _read_prepared(folder: Path) -> str | None:
    """Read the prepared text, or None where there is none that is complete and right."""
    if not _dataset_folder(folder).exists():
        return None
    try:
        sources = _builder(folder).as_data_source()
        text = b"".join(sources[split][0]["text"] for split in SPLITS)
    except Exception:
        # A damaged preparation shows as almost anything: missing files, protobuf and JSON errors, array_record's own.
        return None
    return text.decode("utf-8") if hashlib.sha256(text).hexdigest() == SHA256 else None


def _check_source(folder: Path) -> None:
    """Find out at once what TFDS finds out after more than three minutes of retries."""
    manual = folder / "downloads" / "manual" / "input.txt"
    if manual.exists():
        found = hashlib.sha256(manual.read_bytes()).hexdigest()
        if found != SHA256:
            raise DataError(
                f"{manual} is not tiny Shakespeare: its SHA-256 is {found} and should be {SHA256}; "
                f"replace it by {URL}, or delete it to download"
            )
        return
    # TFDS writes NAME.INFO beside each finished download NAME.
    infos = (folder / "downloads" / TinyShakespeareArrayRecord.name).rglob("*.INFO")
    if any(info.with_suffix("").exists() for info in infos):
        return
    if (reason := _why_unreachable(URL)) is not None:
        raise DataError(
            f"tiny_shakespeare is not in {folder} and cannot be downloaded ({reason}): put {URL} at {manual}"
        )


def _why_unreachable(url: str) -> str | None:
    """None where the URL answers within a few seconds."""
    reasons = [f"no answer within {_PROBE_SECONDS:.0f} s"]

    def ask() -> None:
        try:
            requests.head(url, timeout=_PROBE_SECONDS, allow_redirects=True).raise_for_status()
            reasons.clear()
        except Exception as error:
            reasons[:] = [type(error).__name__]

    # In a thread because no timeout covers the look-up of the host's name.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PROBE_SECONDS)
    return reasons[0] if reasons else None


def _prepare(folder: Path) -> None:
    damaged = _dataset_folder(folder)
    if damaged.exists():
        shutil.rmtree(damaged)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS announces itself in several lines
            _builder(folder).download_and_prepare()
    except Exception as error:
        if _read_prepared(folder) is not None:
            return  # another process was faster
        if isinstance(error, OSError):
            raise
        raise DataError(f"tiny_shakespeare could not be prepared in {folder}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
