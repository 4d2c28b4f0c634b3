"""Files written in place must be what torch.save writes; memory must not follow the file's size."""

import subprocess
import sys
import textwrap
import zipfile
from collections import OrderedDict

import pytest
import torch

from lazytrain_plugin.runtime import streamed_file, zip_checksums
from lazytrain_plugin.runtime.streamed_file import (
    DamagedFileError,
    MappedFile,
    StreamedSave,
    TensorSpec,
    streamed_bytes,
)

LOADERS = [{"mmap": mmap, "weights_only": weights_only} for mmap in (False, True) for weights_only in (False, True)]


def _expected():
    generator = torch.Generator().manual_seed(0)
    return {
        "step": 7,
        "flat": [
            torch.randn(1_000_003, generator=generator),
            torch.randn(1, generator=generator),
            torch.tensor(3.5),
            torch.empty(0),
        ],
        "nested": OrderedDict(
            codes=torch.arange(257, dtype=torch.int64).to(torch.uint8),
            half=torch.randn(5, 7, generator=generator).bfloat16(),
            pair=(torch.arange(3), "text"),
        ),
        "real": torch.arange(12.0).reshape(3, 4).t(),
    }


def _skeleton(tree):
    """Every tensor but "real" and the pair's announced only."""
    spec = TensorSpec.like
    return {
        "step": tree["step"],
        "flat": [spec(tensor) for tensor in tree["flat"]],
        "nested": OrderedDict(
            codes=spec(tree["nested"]["codes"]), half=spec(tree["nested"]["half"]), pair=tree["nested"]["pair"]
        ),
        "real": tree["real"],
    }


def _write_all(path, tree):
    with StreamedSave(path, _skeleton(tree)) as file:
        for index in reversed(range(len(tree["flat"]))):  # order of writes is free
            file.write(("flat", index), tree["flat"][index])
        for key in ("half", "codes"):
            file.write(("nested", key), tree["nested"][key])


@pytest.mark.parametrize("loader", LOADERS, ids=str)
def test_reads_back_as_torch_save_would(tmp_path, loader, monkeypatch):
    monkeypatch.setattr(streamed_file, "_CHUNK_BYTES", 1000)  # many chunks, the last one ragged
    tree = _expected()
    _write_all(tmp_path / "streamed.pt", tree)
    loaded = torch.load(tmp_path / "streamed.pt", **loader)
    assert loaded["step"] == 7 and loaded["nested"]["pair"][1] == "text"
    assert type(loaded["nested"]) is OrderedDict
    pairs = [*zip(tree["flat"], loaded["flat"], strict=True)]
    pairs += [(tree["nested"][key], loaded["nested"][key]) for key in ("codes", "half")]
    pairs += [(tree["nested"]["pair"][0], loaded["nested"]["pair"][0]), (tree["real"], loaded["real"])]
    for expected, got in pairs:
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_real_tensor_inside_an_opaque_object_is_not_lost(tmp_path):
    parameter = torch.nn.Parameter(torch.arange(5.0))
    with StreamedSave(
        tmp_path / "x.pt", {"before": parameter, "leaf": TensorSpec(torch.Size([3]), torch.float32)}
    ) as f:
        f.write(("leaf",), torch.tensor([1.0, 2.0, 3.0]))
    loaded = MappedFile(tmp_path / "x.pt").content
    assert loaded["before"].tolist() == [0, 1, 2, 3, 4] and loaded["leaf"].tolist() == [1, 2, 3]


def test_real_tensors_that_share_memory_stay_shared(tmp_path):
    base = torch.arange(6.0)
    with StreamedSave(tmp_path / "x.pt", {"a": base, "b": base[2:], "zeros": torch.zeros(1).expand(1000)}):
        pass
    loaded = torch.load(tmp_path / "x.pt")
    loaded["a"][2] = 9
    assert loaded["b"][0] == 9
    assert loaded["zeros"].shape == (1000,) and (tmp_path / "x.pt").stat().st_size < 4000


@pytest.mark.parametrize("piece_bytes", [zip_checksums._PIECE_BYTES, 40_000])
def test_every_record_is_a_stored_zip_entry_of_the_right_size(tmp_path, monkeypatch, piece_bytes):
    """What other readers of the format rely on: sizes and checksums in the zip directory, no compression."""
    monkeypatch.setattr(zip_checksums, "_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(streamed_file, "_CHUNK_BYTES", 3 * piece_bytes)
    tree = _expected()
    _write_all(tmp_path / "x.pt", tree)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        sizes = sorted(info.file_size for info in archive.infolist() if "/data/" in info.filename)
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
        assert archive.testzip() is None
    content = (tmp_path / "x.pt").read_bytes()
    for record in zip_checksums.records_of(tmp_path / "x.pt"):  # a reader may take either
        assert {content[at : at + 4] for at in record.crc32_offsets} == {record.crc32.to_bytes(4, "little")}
    tensors = [*tree["flat"], tree["nested"]["codes"], tree["nested"]["half"], tree["nested"]["pair"][0], tree["real"]]
    assert sizes == sorted(tensor.numel() * tensor.itemsize for tensor in tensors)


@pytest.mark.parametrize("small_bytes", [streamed_file._SMALL_BYTES, 0], ids=["small", "large"])
def test_other_bytes_than_were_saved_are_found(tmp_path, monkeypatch, small_bytes):
    monkeypatch.setattr(streamed_file, "_SMALL_BYTES", small_bytes)
    path = tmp_path / "x.pt"
    with StreamedSave(path, [TensorSpec(torch.Size([1000]), torch.float32)] * 2) as file:
        for index in range(2):
            file.write((index,), torch.full((1000,), 1.0 + index))
    file = MappedFile(path)
    file.verify_from_now()
    for tensor in (*file.content, torch.zeros(3), file.content[0][5:7]):
        file.verify(tensor)
    record = next(record for record in zip_checksums.records_of(path) if record.name == "data/1")
    with open(path, "r+b") as raw:
        raw.seek(record.offset + 123)
        raw.write(b"x")
    damaged = MappedFile(path)
    says = f"{path}: data/1 is not what was saved there"
    if small_bytes:
        with pytest.raises(DamagedFileError, match=says):
            damaged.verify_from_now()
    else:
        damaged.verify_from_now()
        damaged.verify(damaged.content[0])
        with pytest.raises(DamagedFileError, match=says):
            damaged.verify(damaged.content[1][3:5])


def test_a_large_pickle_is_verified_before_it_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(streamed_file, "_SMALL_BYTES", 0)
    path = tmp_path / "x.pt"
    with StreamedSave(path, [TensorSpec(torch.Size([10]), torch.float32), 1_200_000]) as file:
        file.write((0,), torch.ones(10))
    content = path.read_bytes()
    number = (1_200_000).to_bytes(4, "little")
    assert content.count(number) == 1
    path.write_bytes(content.replace(number, (1_200_001).to_bytes(4, "little")))
    damaged = MappedFile(path)
    assert damaged.content[1] == 1_200_001
    with pytest.raises(DamagedFileError, match="data.pkl is not what was saved there"):
        damaged.verify_from_now()


def test_estimate_covers_the_file(tmp_path):
    skeleton = {"many": [TensorSpec(torch.Size([n]), torch.float32) for n in range(3000)]}
    with StreamedSave(tmp_path / "x.pt", skeleton) as file:
        for n in range(3000):
            file.write(("many", n), torch.zeros(n))
    size = (tmp_path / "x.pt").stat().st_size
    assert size <= streamed_bytes(skeleton) <= size * 1.1 + 2**20


def test_refuses_another_shape_or_dtype_and_an_unknown_leaf(tmp_path):
    file = StreamedSave(tmp_path / "x.pt", [TensorSpec(torch.Size([3]), torch.float32)])
    with pytest.raises(ValueError, match="announced"):
        file.write((0,), torch.zeros(4))
    with pytest.raises(ValueError, match="announced"):
        file.write((0,), torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(KeyError):
        file.write((1,), torch.zeros(3))
    file.abort()


def test_closing_with_a_leaf_missing_is_an_error(tmp_path):
    with (
        pytest.raises(ValueError, match="not written"),
        StreamedSave(tmp_path / "x.pt", {"a": TensorSpec(torch.Size([3]), torch.float32)}),
    ):
        pass


def test_released_tensors_are_read_again_from_the_file(tmp_path):
    tree = _expected()
    _write_all(tmp_path / "x.pt", tree)
    file = MappedFile(tmp_path / "x.pt")
    flat = file.content["flat"]
    flat[0].fill_(0)  # proves that the pages really go: the private change is lost
    file.release(flat[0])
    inside = slice(1024, 900_000)  # the first and last page may stay
    torch.testing.assert_close(flat[0][inside], tree["flat"][0][inside], rtol=0, atol=0)
    torch.testing.assert_close(flat[1], tree["flat"][1], rtol=0, atol=0)


def test_release_never_touches_memory_outside_the_file(tmp_path):
    _write_all(tmp_path / "x.pt", _expected())
    file = MappedFile(tmp_path / "x.pt")
    ordinary = torch.ones(3_000_000)
    file.release(ordinary)
    assert ordinary.min() == 1


MEMORY_PROBE = """
import resource, sys, torch
from lazytrain_plugin.runtime.streamed_file import MappedFile, StreamedSave, TensorSpec
def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
count, numel = 40, 2_500_000  # 400 MB in tensors of 10 MB
warm = torch.zeros(numel)
with StreamedSave(sys.argv[1] + "warm", [TensorSpec(warm.shape, warm.dtype)]) as file:
    file.write((0,), warm)
MappedFile(sys.argv[1] + "warm")
before = peak_mib()
with StreamedSave(sys.argv[1], [TensorSpec(torch.Size([numel]), torch.float32)] * count) as file:
    for index in range(count):
        file.write((index,), torch.full((numel,), float(index)))
print("save", peak_mib() - before)
file = MappedFile(sys.argv[1])
loaded = file.content
for index in range(count):
    assert loaded[index].mean().item() == index
    file.release(loaded[index])
print("load", peak_mib() - before)
"""


def test_memory_does_not_follow_the_file_size(tmp_path):
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY_PROBE), str(tmp_path / "big.pt")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert out.returncode == 0, out.stderr
    grown = {line.split()[0]: float(line.split()[1]) for line in out.stdout.splitlines()}
    assert grown["save"] < 60 and grown["load"] < 60, grown
