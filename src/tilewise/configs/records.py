"""Records of measured configs in the user's own folder, which ``tilewise tune`` writes and every lookup asks first.

One JSON file an architecture, such as ``sm_90.json``, in the format of the files that ship (``configs/data``): a header that says
on what and when it was measured, and a list of records. A record is a class of problems (``fields``) and a config. The file is
read once, at the first lookup that needs it; one that cannot be used raises InvalidInput and is never passed over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..arch import Arch, arch_named
from ..errors import InvalidInput
from ..problem import Problem

__all__ = [
    "BUILT_IN",
    "FORMAT",
    "HEADER",
    "Found",
    "bare",
    "encode",
    "fields",
    "find",
    "folder",
    "read",
    "trying",
    "user_file",
    "write",
]

FORMAT = "1.0"  # major.minor: another major cannot be read
HEADER = ("format", "arch", "device", "torch", "triton", "cuda", "tilewise", "date")
NOTES = ("date", "problem", "ms", "gain")  # what a record may say about how it was measured
BUILT_IN = "built-in rule"
LENGTHS = {"short": 1024, "medium": 4096, "long": 16384}  # a length of each class
MASKS = {"full": "full", "upper": "upper:0", "lower": "lower:64", "band": "upper:0,lower:64"}  # a mask of each class

Key = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """A config and where it comes from. ``tried``: ``tilewise tune`` is at work on it, and no rule but the law applies."""

    config: Any
    origin: str
    tried: bool = False


_trying: dict[tuple[str, str], Any] = {}  # by (backend, pass): what ``trying`` puts before everything else
_read: dict[str, dict[Key, Found]] = {}  # the user's records, by architecture


def folder() -> Path:
    """``$TILEWISE_CONFIG_DIR``, or ``tilewise`` in the user's config folder (``$XDG_CONFIG_HOME``, or ``~/.config``)."""
    own = os.environ.get("TILEWISE_CONFIG_DIR")
    if own:
        return Path(own)
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path(os.path.expanduser("~")) / ".config") / "tilewise"


def user_file(arch: str) -> Path:
    """The user's file of this architecture, which need not exist."""
    return folder() / f"{arch}.json"


def fields(problem: Problem, backend: str, pass_: str) -> dict[str, Any]:
    """The class of problems that share a record: the words of a record without its config."""
    from . import hopper, length_class, padded

    p = problem
    _, _, has_upper, has_lower = p.bounds
    if backend == "triton":
        wide = max(padded(p.head_dim), padded(p.head_dim_v))
        key = {"backend": backend, "pass": pass_, "itemsize": p.itemsize, "head_dim": wide, "bounded": has_upper or has_lower}
        return {**key, "length": length_class(p, pass_)}
    mask = {(False, False): "full", (True, False): "upper", (False, True): "lower", (True, True): "band"}[has_upper, has_lower]
    key = {"backend": backend, "pass": pass_, "dtype": p.dtype, "head_dim": p.head_dim, "head_dim_v": p.head_dim_v, "mask": mask}
    key["length"] = length_class(p, "fwd")
    return key | ({"tiles": "few" if hopper.few_tiles(p) else "many"} if pass_ == "fwd" else {})


def _values() -> dict[str, dict[str, tuple[Any, ...]]]:
    """What each word of a record may be, by backend."""
    from . import PASSES
    from .hopper import CHOICES

    pairs = {size for pair in CHOICES for size in pair}
    return {
        "triton": {
            "pass": PASSES,
            "itemsize": (2, 4),
            "head_dim": (16, 32, 64, 128, 256, 512),
            "bounded": (False, True),
            "length": tuple(LENGTHS),
        },
        "hopper": {
            "pass": ("fwd", "bwd"),
            "dtype": ("float16", "bfloat16"),
            "head_dim": tuple(sorted(pairs)),
            "head_dim_v": tuple(sorted(pairs)),
            "mask": tuple(MASKS),
            "length": tuple(LENGTHS),
            "tiles": ("few", "many"),
        },
    }


def encode(config: Any) -> Any:
    """A config as JSON: a list for the ``triton`` backend, words and values for ``hopper``."""
    from . import Config

    if isinstance(config, Config):
        return [*dataclasses.astuple(config)[:4], *([config.split] if config.split != 1 else [])]
    words = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {n: encode(v) if dataclasses.is_dataclass(v) else v for n, v in words.items() if v is not None}


def _made(kind: Any, value: Any, what: str) -> Any:
    """A dataclass of ints and bools from its words; raises ValueError with what is wrong."""
    kinds = {f.name: f for f in dataclasses.fields(kind)}
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {value!r}, expected {{{', '.join(kinds)}}}")
    unknown = sorted(set(value) - set(kinds))
    missing = [n for n, f in kinds.items() if n not in value and f.default is dataclasses.MISSING]
    if unknown or missing:
        wrong = f"has the unknown word {unknown[0]!r}" if unknown else f"lacks the word {missing[0]!r}"
        raise ValueError(f"{what} {wrong}, expected {', '.join(kinds)}")
    for name, got in value.items():
        wanted = bool if "bool" in str(kinds[name].type) else int
        if type(got) is not wanted:
            raise ValueError(f"{what}: {name} is {got!r}, expected {'true or false' if wanted is bool else 'an int'}")
    return kind(**value)


def _decode(backend: str, pass_: str, value: Any) -> Any:
    """The config that ``encode`` wrote; raises ValueError with what is wrong."""
    from . import Config
    from .hopper import HopperConfig
    from .hopper_backward import BackwardConfig, KeptConfig, KeysConfig, QueriesConfig

    if backend == "triton":
        if not isinstance(value, list) or len(value) not in (4, 5) or any(type(x) is not int or x < 1 for x in value):
            words = "block_m, block_n, num_warps, num_stages(, split)"
            raise ValueError(f"config is {value!r}, expected [{words}], ints of at least 1")
        return Config(*value)
    if pass_ == "fwd":
        return _made(HopperConfig, value, "config")
    kinds = {"keys": KeysConfig, "queries": QueriesConfig, "kept": KeptConfig}
    if not isinstance(value, dict) or sorted(value) not in (["keys", "queries"], ["kept", "keys"]):
        raise ValueError(f"config is {value!r}, expected {{keys, queries}} or {{keys, kept}}")
    parts: dict[str, Any] = {name: _made(kinds[name], each, f"config, {name}") for name, each in value.items()}
    return BackwardConfig(**parts)


def _why_illegal(backend: str, pass_: str, problem: Problem, config: Any) -> str | None:
    from . import hopper, hopper_backward, illegal

    if backend == "triton":
        return illegal(problem, pass_, config)
    pair = problem.head_dim, problem.head_dim_v
    dims = hopper_backward.dims_of(problem)
    if problem.arch.name != "sm_90" or pair not in hopper.CHOICES or (pass_ == "bwd" and dims not in hopper_backward.DKDV):
        return f"the hopper backend has no {pass_} at head_dim {pair[0]}/{pair[1]} on {problem.arch.name}"
    return hopper.illegal(problem, config) if pass_ == "fwd" else hopper_backward.illegal_backward(problem, config)


def _sample(row: dict[str, Any], arch: Arch) -> Problem:
    """A problem of the class of a record."""
    dtype = row.get("dtype") or ("bfloat16" if row["itemsize"] == 2 else "float32")
    mask = MASKS[row["mask"]] if "mask" in row else MASKS["upper" if row["bounded"] else "full"]
    dims = f"{row['head_dim']}/{row.get('head_dim_v', row['head_dim'])}"
    return Problem.parse(f"dtype={dtype} seqlen={LENGTHS[row['length']]} head_dim={dims} mask={mask}", arch)


def _record(row: Any, arch: Arch) -> tuple[Key, Any]:
    """The key and the config of one record of a file; raises ValueError with what is wrong."""
    if not isinstance(row, dict):
        raise ValueError(f"it is {row!r}, expected {{pass, ..., config}}")
    row = {"backend": "triton", **row}
    kinds = _values()
    if row["backend"] not in kinds:
        raise ValueError(f"backend is {row['backend']!r}, expected {' or '.join(kinds)}")
    values = kinds[row["backend"]]
    words = [w for w in values if not (w == "tiles" and row.get("pass") != "fwd")]
    known = {"backend", *words, "config", *NOTES}
    unknown, missing = sorted(set(row) - known), [w for w in (*words, "config") if w not in row]
    if unknown:
        raise ValueError(f"the word {unknown[0]!r} is unknown, expected {', '.join(sorted(known))}")
    if missing:
        raise ValueError(f"the word {missing[0]!r} is missing, expected {', '.join((*words, 'config'))}")
    for word in words:
        if not any(row[word] is v or (type(row[word]) is type(v) and row[word] == v) for v in values[word]):
            raise ValueError(f"{word} is {row[word]!r}, expected {', '.join(map(str, values[word]))}")
    config = _decode(row["backend"], row["pass"], row["config"])
    problem = _sample(row, arch)
    strided = dataclasses.replace(problem, bulk=False)
    reasons = [_why_illegal(row["backend"], row["pass"], each, config) for each in (problem, strided)]
    if None not in reasons:
        raise ValueError(f"config {row['config']!r} is not legal: {reasons[0]}")
    return (("backend", row["backend"]), *((w, row[w]) for w in words)), config


def read(path: Path, arch: str | None = None) -> tuple[dict[str, Any], list[tuple[Key, Any, dict[str, Any]]]]:
    """The header of a file, and its records: key, config and the words that stand there.

    Raises:
        InvalidInput: the file cannot be used; the message names it, what came, what is expected and what to do.
    """

    def no(what: str) -> InvalidInput:
        return InvalidInput(
            f"tuning records {str(path)!r}: {what}. Correct or delete the file (`tilewise tune` writes a new one), or set "
            "TILEWISE_CONFIG_DIR to another folder."
        )

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise no(f"it cannot be read ({error}), expected a text file of JSON") from None
    except ValueError as error:
        raise no(f"it is not JSON ({error}), expected an object with a header and 'records'") from None
    if not isinstance(content, dict) or not isinstance(content.get("records"), list):
        raise no("it holds no list 'records', expected an object with a header and 'records'")
    major = str(content.get("format", "none")).partition(".")[0]
    if major != FORMAT.partition(".")[0]:
        raise no(f"its format is {content.get('format')!r}, expected {FORMAT!r}, which this version of tilewise reads")
    header = {name: content.pop(name, None) for name in HEADER}
    rows = content.pop("records")
    if content:
        raise no(f"the word {sorted(content)[0]!r} is unknown, expected {', '.join(HEADER)} and records")
    if arch is not None and header["arch"] != arch:
        raise no(f"it is for arch {header['arch']!r}, expected {arch!r}, the device that asks")
    facts = arch_named(str(header["arch"]))
    if facts is None:
        raise no(f"its arch is {header['arch']!r}, expected one that tilewise knows")
    out, seen = [], set()
    for i, row in enumerate(rows):
        try:
            key, config = _record(row, facts)
        except ValueError as error:
            raise no(f"record {i}: {error}") from None
        if key in seen:
            raise no(f"record {i}: a record before it is for the same problems, expected one for each")
        seen.add(key)
        out.append((key, config, row))
    return header, out


def _of_user(arch: Arch) -> dict[Key, Found]:
    found = _read.get(arch.name)
    if found is None:
        path, found = user_file(arch.name), {}
        if os.path.lexists(path):
            header, rows = read(path, arch.name)
            found = {k: Found(c, f"user record {path} of {r.get('date') or header['date']}") for k, c, r in rows}
        _read[arch.name] = found
    return found


def find(problem: Problem, backend: str, pass_: str) -> Found | None:
    """The user's record for this problem, if there is one."""
    tried = _trying.get((backend, pass_))
    if tried is not None:
        return Found(tried, "on trial", True)
    records = _of_user(problem.arch)
    return records.get(tuple(fields(problem, backend, pass_).items())) if records else None


def bare() -> None:
    """Forget what was read: the next lookup reads the files again (``configs.forget`` empties what was looked up, too)."""
    _read.clear()


@contextlib.contextmanager
def trying(backend: str, pass_: str, config: Any) -> Iterator[None]:
    """Within it a lookup of this pass answers with this config wherever that is legal. For one thread, with lookups forgotten."""
    before = _trying.get((backend, pass_))
    _trying[backend, pass_] = config
    try:
        yield
    finally:
        del _trying[backend, pass_]
        if before is not None:
            _trying[backend, pass_] = before


def write(path: Path, header: dict[str, Any], rows: Iterable[dict[str, Any]]) -> Path | None:
    """Put records into a file, whole or not at all. Those for other problems stay, if the header says the same device and software;
    if not, the old file is kept beside it under the name that is returned, and is no longer read."""
    new = {key: row for row, key in ((row, _record(row, _facts(header))[0]) for row in rows)}
    kept: Path | None = None
    if path.exists():
        before, old = read(path, header["arch"])
        if all(before[name] == header[name] for name in HEADER if name not in ("date", "format")):
            new = {key: row for key, _, row in old} | new
        else:
            kept = path.with_name(path.name + ".old")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n    ".join(json.dumps(row) for row in new.values())
    text = f'{json.dumps({name: header[name] for name in HEADER})[:-1]},\n  "records": [\n    {lines}\n  ]}}\n'
    handle, draft = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        if kept is not None:
            os.replace(path, kept)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    return kept


def _facts(header: dict[str, Any]) -> Arch:
    facts = arch_named(header["arch"])
    if facts is None:
        raise InvalidInput(f"arch is {header['arch']!r}, expected one that tilewise knows.")
    return facts
