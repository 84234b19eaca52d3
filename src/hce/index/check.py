"""Check: find damage in the files and rows of an index or a model, and heal it if possible.

Derived parts (engine, words, tree) can be rebuilt, and a vector can be encoded again from its text. A damaged text or
damaged weights of an encoder can only be reported. A folder without `checksums.json`, such as that of an encoder that
hce did not write, is reported as unknown, unless the encoder's fingerprint shows damage.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, HceError, InputError
from hce.files import CHECKSUMS, check_tree, damage_in, delete_file, is_file, is_folder, write_checksums
from hce.index.background import MAP_FILE, is_damaged_map
from hce.index.index import Index
from hce.index.manifest import MANIFEST_FILE, Manifest, file_stamps
from hce.index.tables import STORE_FILE, Reader, content_key, row_checksum, vector_checksum
from hce.index.token_codes import TokenCodes
from hce.index.tree import NumberedHierarchy
from hce.index.writing import Cutter, chunks_of, insert_documents
from hce.progress import Advance, progress_bar
from hce.training.model_folder import FACTS, IN_AN_INDEX, ModelFolder

NOT_UNIT = 1e-3  # tolerance of a unit vector's length
FROM_A_COPY = "restore it from a copy"


class Finding(NamedTuple):
    """A fault in a `part` of an index or a model: damage, or a missing checksum (unknown).

    `can_heal` says whether a repair heals it, and `remedy` what else to do. `number` is the damaged document's, if any.
    """

    part: str
    what: str
    state: Literal["damaged", "unknown"] = "damaged"
    can_heal: bool = False
    remedy: str = ""
    number: int | None = None


@dataclass(frozen=True)
class Checkup:
    """The result of a check: findings left, findings that a repair has healed, and an index's number of documents."""

    path: str
    kind: Literal["index", "model"]
    findings: tuple[Finding, ...]
    healed: tuple[Finding, ...] = ()
    documents: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return all(finding.state != "damaged" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return the checkup with all findings, for JSON."""
        lists = {name: [each._asdict() for each in getattr(self, name)] for name in ("findings", "healed")}
        return {**asdict(self), **lists, "sound": self.is_sound}


def check(path: str | Path, *, repair: bool = False, progress: bool = False) -> Checkup:
    """Read all of an index or model, and return what is damaged or unknown.

    With `repair`, rebuild derived parts, encode damaged vectors again, and write missing checksums.
    """
    path = Path(path)
    if is_file(path / MANIFEST_FILE) and not is_file(path / "hierarchy.safetensors"):
        return _check_index(path, repair, progress)
    if any(is_file(path / name) for name in (FACTS, "modules.json", "config.json")):
        return _check_model(path, repair, progress)
    raise InputError(f"{path}: neither an index nor a model is there; name the folder of one")


# ------------------------------------------------------------------------------------------------- a model


def _check_model(path: Path, repair: bool, progress: bool) -> Checkup:
    findings = _encoder_findings(path, path, None, progress)
    if is_file(path / FACTS) and not findings:
        try:
            ModelFolder.read(path)
        except FormatError as error:
            findings = [Finding("model", str(error), remedy="train or copy the model again")]
    if not repair or not any(finding.can_heal for finding in findings):
        return Checkup(str(path), "model", tuple(findings))
    write_checksums(path)
    return replace(_check_model(path, repair=False, progress=False), healed=tuple(findings))


def _encoder_findings(folder: Path, root: Path, fingerprint: str | None, progress: bool) -> list[Finding]:
    """Compare an encoder's files with checksums; without these, with its fingerprint."""
    name, remedy = "model", "train or copy the model again"
    if folder != root:
        name, remedy = folder.name, f"copy {folder.name}/ from another copy, or from the model of the index"
    size = sum(found.st_size for found in check_tree(folder).values())
    with progress_bar(f"checking {name}", size, "bytes", show=progress) as advance:
        damaged = damage_in(folder, advance)
    if damaged is not None:
        return [Finding(name, f"{name}/{each}" if folder != root else each, remedy=remedy) for each in damaged]
    try:
        found = Encoder.load(folder).fingerprint
        wanted = fingerprint or (ModelFolder.read(folder).facts.fingerprint if is_file(folder / FACTS) else found)
    except HceError as error:
        return [Finding(name, str(error), remedy=remedy)]
    if found != wanted:
        return [Finding(name, f"{folder} is not the encoder that was written there", remedy=remedy)]
    is_known = fingerprint is not None or is_file(folder / FACTS)
    about = "the weights are unchanged" if is_known else "changes to its files cannot be detected"
    return [Finding(name, f"{name} has no {CHECKSUMS} ({about})", "unknown", can_heal=True)]


# ------------------------------------------------------------------------------------------------- an index


def _check_index(path: Path, repair: bool, progress: bool) -> Checkup:
    findings, documents = _index_findings(path, progress)
    checkup = Checkup(str(path), "index", tuple(findings), documents=documents)
    if not repair or not any(finding.can_heal for finding in findings):
        return checkup
    _repair(path, findings, progress)
    left, documents = _index_findings(path, progress)
    lost = [each for each in findings if each.part == "log"]  # a repair hides lost writes, so report them again
    healed = tuple(each for each in findings if each not in left and each not in lost)
    return Checkup(str(path), "index", (*left, *lost), healed, documents)


def _index_findings(path: Path, progress: bool) -> tuple[list[Finding], int]:
    manifest = Manifest.read(path)
    check_tree(path)
    model = manifest.folder_of(IN_AN_INDEX)
    findings = _encoder_findings(path / manifest.encoder_folder, path, manifest.fingerprint, progress)
    findings += [
        Finding("model", f"{model}/{each}", remedy="it only describes the training; copy it from the model")
        for each in damage_in(path / model) or []
    ]
    if manifest.hierarchy is not None:
        try:
            NumberedHierarchy.load(path / manifest.hierarchy)
            if not is_file(path / manifest.hierarchy / CHECKSUMS):
                findings.append(Finding("tree", f"{manifest.hierarchy}/ has no {CHECKSUMS}", "unknown", can_heal=True))
        except FormatError as error:
            findings.append(Finding("tree", str(error), can_heal=True))
    tokens = path / manifest.folder_of("tokens")
    if is_folder(tokens) and (damage := TokenCodes(tokens).damage()) is not None:
        findings.append(Finding("tokens", damage, can_heal=True))
    if is_damaged_map(path / MAP_FILE):
        findings.append(Finding("map", f"{MAP_FILE} has changed since it was written", can_heal=True))
    documents = 0
    try:
        with Index.open(path) as index, index.state.reading() as reader:
            in_store = list(_store_findings(reader, manifest, progress))
            documents = reader.row_count("documents")
            findings += in_store
            findings += _derived_findings(index, reader)
    except HceError as error:
        findings.append(Finding("store", str(error), remedy=f"{FROM_A_COPY}, or index again"))
    return findings, documents


def _derived_findings(index: Index, reader: Reader) -> list[Finding]:
    """Read the snapshots; a missing one is no damage, as a search makes it again."""
    findings = []
    for live in index.state.derived.local_parts(reader):
        ahead = live.ahead()
        if ahead is not None:
            line = f"{ahead.relative_to(index.path)} knows of a later write than {STORE_FILE}: writes were lost"
            remedy = f"{FROM_A_COPY} along with {STORE_FILE}-wal, or add again what is missing"
            findings.append(Finding("log", line, remedy=remedy))
        for folder, damage in live.damaged_snapshots(reader):
            findings.append(Finding(folder.parent.name, damage, can_heal=True))
    return findings


# ------------------------------------------------------------------------------------------------- the store


def _store_findings(reader: Reader, manifest: Manifest, progress: bool) -> Iterator[Finding]:
    faults = reader.faults()
    can_heal = bool(faults) and all(" index " in f" {fault} " for fault in faults)
    for fault in faults:
        yield Finding("store", f"{STORE_FILE}: {fault}", can_heal=can_heal, remedy="" if can_heal else FROM_A_COPY)
    if faults and not can_heal:
        return  # the rows of such a file cannot be trusted
    tables = ("documents", "vectors", "passages", "changes")
    total = sum(map(reader.row_count, tables))
    with progress_bar("checking rows", total, "rows", show=progress) as advance:
        sound = yield from _document_findings(reader, advance)
        yield from _vector_findings(reader, sound, advance)
        if reader.row_count("passages"):
            yield from _passage_findings(reader, sound, advance)
        yield from _change_findings(reader, manifest, sound, advance)


class _Numbers(NamedTuple):
    """The numbers of all documents, and of those without damage."""

    there: set[int]
    sound: set[int]

    def unsound(self, part: str, number: int, line: str) -> Finding:
        """Return a finding about a vector; it can be healed if its document is sound."""
        if number in self.sound:
            return Finding(part, line, can_heal=True, number=number)
        return Finding(part, f"{line}, and neither is its text", remedy="add the document again", number=number)


def _document_findings(reader: Reader, advance: Advance) -> Generator[Finding, None, _Numbers]:
    """Compare each document with its checksum, and its text with its key."""
    numbers = _Numbers(set(), set())
    for *row, checksum in reader.raw_rows("documents"):
        advance(1)
        number, doc_id, content, _, title, text = row
        numbers.there.add(number)
        try:
            is_text_sound = content_key(Document("", text.decode(), title.decode()).full_text) == content
        except (AttributeError, UnicodeDecodeError):
            is_text_sound = False
        if is_text_sound and checksum == row_checksum(*row):
            numbers.sound.add(number)
            continue
        name = doc_id.decode(errors="backslashreplace") if isinstance(doc_id, bytes) else repr(doc_id)
        what = "its text is sound, but its id, title or metadata are not" if is_text_sound else "its text is not"
        remedy = "replace it with 'hce add --update', or delete it with 'hce remove'"
        yield Finding(
            "documents", f"document {name!r} (number {number}): {what} as written", remedy=remedy, number=number
        )
    return numbers


def _vector_findings(reader: Reader, numbers: _Numbers, advance: Advance) -> Iterator[Finding]:
    left = set(numbers.there)
    for number, vector, checksum in reader.raw_rows("vectors"):
        advance(1)
        if number not in numbers.there:
            line = f"document number {number} is gone, but its vector is still there"
            yield Finding("vectors", line, remedy="add the document again", number=number)
            continue
        left.discard(number)
        if not _is_vector(vector, reader.dim) or checksum != vector_checksum(number, vector):
            yield numbers.unsound("vectors", number, f"the vector of document number {number} has changed")
    for number in sorted(left):
        yield numbers.unsound("vectors", number, f"document number {number} has no vector")


def _passage_findings(reader: Reader, numbers: _Numbers, advance: Advance) -> Iterator[Finding]:
    """Check passages; report the documents of a damaged one and its neighbors."""
    before, is_damaged = None, False
    for *row, checksum in reader.raw_rows("passages"):
        advance(1)
        document, start, stop, vector = row
        is_sound = document in numbers.there and _is_vector(vector, reader.dim) and 0 <= start < stop
        is_sound = is_sound and checksum == row_checksum(*row)
        for number in {before, document} if not is_sound else {document} if is_damaged else set():
            if number in numbers.there:
                yield numbers.unsound("passages", number, f"a passage of document number {number} has changed")
        before, is_damaged = document, not is_sound


def _change_findings(reader: Reader, manifest: Manifest, numbers: _Numbers, advance: Advance) -> Iterator[Finding]:
    """Compare the table of changes with its checksums and with the documents."""
    for *row, checksum in reader.raw_rows("changes"):
        advance(1)
        if checksum != reader.change_checksum(row):
            yield Finding("changes", f"change {row[0]} has changed since it was written", can_heal=True)
    moment, removed = reader.moment(), reader.removed_since(-1)
    if moment.documents != len(numbers.there):
        line = f"{len(numbers.there):,} documents are there, but {moment.documents:,} were written"
        yield Finding("changes", line, can_heal=True, remedy="find out which are missing, and add them again")
    first = range(1, min(manifest.documents, moment.last) + 1)
    gone = {number for number in first if number not in numbers.there}
    known = set(removed.tolist())
    if known & numbers.there or gone != {number for number in known if number <= manifest.documents}:
        yield Finding("changes", "the record of removed documents has changed since it was written", can_heal=True)


def _is_vector(blob: Any, dim: int) -> bool:
    """Return whether a blob is a unit vector of this dimension."""
    if not isinstance(blob, bytes) or len(blob) != 4 * dim:
        return False
    vector = np.frombuffer(blob, "<f4")
    with np.errstate(over="ignore", invalid="ignore"):
        return abs(math.sqrt(float(vector @ vector)) - 1) < NOT_UNIT


# ------------------------------------------------------------------------------------------------- healing


def _repair(path: Path, findings: list[Finding], progress: bool) -> None:
    """Heal what can be healed, and write missing checksums."""
    needed = ("store", Manifest.read(path).encoder_folder)
    beyond = [each for each in findings if each.part in needed and each.state == "damaged" and not each.can_heal]
    if beyond:
        raise InputError(f"{path}: nothing was repaired, since {beyond[0].what}; first {beyond[0].remedy}")
    if any(each.part == "map" for each in findings):
        delete_file(path / MAP_FILE)  # the server draws it again when asked
    with Index.open(path) as index:
        if any(each.part == "store" for each in findings):
            with index.state.store.writing() as writer:
                writer.reindex()
        if any(each.part == "changes" and each.state == "damaged" for each in findings):
            with index.state.store.writing() as writer:
                writer.recount(index.state.manifest.documents)
        unsound = {each.number for each in findings if each.can_heal and each.number is not None}
        if unsound:
            _encode_again(index, sorted(unsound), progress)
        index.rebuild(refit=False, tokens=True if any(each.part == "tokens" for each in findings) else None)
    folder = path / Manifest.read(path).encoder_folder
    if not is_file(folder / CHECKSUMS):
        write_checksums(folder)
        replace(Manifest.read(path), encoder_files=file_stamps(folder)).write(path)
    for name in filter(None, (Manifest.read(path).hierarchy, IN_AN_INDEX)):
        if is_folder(path / name) and not is_file(path / name / CHECKSUMS):
            write_checksums(path / name)


def _encode_again(index: Index, numbers: list[int], progress: bool) -> None:
    """Insert documents again, with new numbers and vectors; all or none."""
    with index.state.store.writing() as writer:
        encoder = index.encoder
        documents = list(writer.documents(numbers).values())
        writer.delete(numbers)
        with progress_bar("encoding again", len(documents), "documents", show=progress) as advance:
            insert_documents(writer, chunks_of([documents]), encoder.encode, Cutter(encoder), advance)
