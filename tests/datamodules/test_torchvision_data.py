"""MNIST and CIFAR-10 from a server on this machine: fetched once, checked, or refused in a line that helps."""

import gzip
import hashlib
import io
import pickle
import socket
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets

from apprentice.errors import BadInput
from datamodules import CIFAR10, CIFAR100, MNIST, FashionMNIST, ImageData, torchvision_data
from datamodules.torchvision_data import TorchvisionData
from tests.commands import bad_input

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
Source = torchvision.datasets.CIFAR10


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):  # torchvision asks once for the address only, and hangs up
            super().handle()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files `self.url` serves; the address is in its file `address`, outside the folder."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        (tmp_path / "address").write_text(f"http://127.0.0.1:{server.server_port}/")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield folder
        server.shutdown()
        thread.join()


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


def cifar_batch(labels: list[int], seed: int) -> bytes:
    images = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    return pickle.dumps({"data": images, "labels": labels})


def serve(served: Path, source: Any, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Put an archive as the original is built on the server, with torchvision's address and sum substituted."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{source.base_folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    (served / source.filename).write_bytes(archive.getvalue())
    monkeypatch.setattr(source, "url", (served.parent / "address").read_text() + source.filename)
    monkeypatch.setattr(source, "tgz_md5", md5(archive.getvalue()))
    return archive.getvalue()


@pytest.fixture
def cifar(served: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    files = {f"data_batch_{i}": cifar_batch([*range(10), i], i) for i in range(1, 6)}
    files["test_batch"] = cifar_batch(list(range(10)) * 2, 6)
    files["batches.meta"] = pickle.dumps({"label_names": CLASSES})
    content = serve(served, Source, files, monkeypatch)
    monkeypatch.setattr(Source, "train_list", [[name, md5(files[name])] for name, _ in Source.train_list])
    monkeypatch.setattr(Source, "test_list", [["test_batch", md5(files["test_batch"])]])
    monkeypatch.setattr(Source, "meta", Source.meta | {"md5": md5(files["batches.meta"])})
    return content


@pytest.fixture
def mnist(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The four archives, with 40 and 20 images; the first mirror refuses connections."""
    resources = []
    for name, _ in torchvision.datasets.MNIST.resources:
        count = 40 if name.startswith("train") else 20
        shape = (count, 28, 28) if "images" in name else (count,)
        values = np.arange(np.prod(shape)) % (256 if "images" in name else 10)
        head = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
        content = gzip.compress(head + values.astype(np.uint8).tobytes())
        (served / name).write_bytes(content)
        resources.append((name, md5(content)))
    address = (tmp_path / "address").read_text()
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", ["http://127.0.0.1:9/", address])


def refuse(data: ImageData) -> str:
    return bad_input(data.split, "train")  # prepare_data and setup


def test_cifar_is_downloaded_once(cifar: bytes, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = CIFAR10(tmp_path / "data", validation_size=0)
    data.prepare_data()
    data.setup()
    assert data.sizes == {"train": 55, "validation": 0, "test": 20}
    first = pickle.loads(cifar_batch([*range(10), 1], 1))["data"].reshape(-1, 3, 32, 32)
    assert torch.equal(data.split("train").inputs[:11], torch.from_numpy(first))
    assert data.split("test").labels.tolist() == list(range(10)) * 2
    (served / Source.filename).unlink()
    again = CIFAR10(tmp_path / "data", validation_size=0)
    assert again.sizes == data.sizes  # read at first use, no server needed
    (tmp_path / Source.filename).write_bytes(cifar)  # put there by hand
    assert CIFAR10(tmp_path, validation_size=0).sizes["test"] == 20
    assert capsys.readouterr() == ("", "")


def test_mnist_is_downloaded_from_the_mirror_that_has_it(mnist: None, tmp_path: Path) -> None:
    data = MNIST(tmp_path / "data", validation_size=10)
    assert data.sizes == {"train": 30, "validation": 10, "test": 20}
    assert data.split("test").inputs[0].flatten().tolist() == [i % 256 for i in range(784)]
    assert MNIST.input_shape == data.split("test").inputs.shape[1:]


def test_cifar100_has_the_classes_of_torchvision(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = torchvision.datasets.CIFAR100
    pixels = np.arange(120 * 3072, dtype=np.uint32).astype(np.uint8).reshape(120, 3072)
    part = {"data": pixels, "fine_labels": [*range(100), *range(20)], "coarse_labels": [0] * 120}
    names = pickle.dumps({"fine_label_names": list(CIFAR100.class_names)})
    files = {"train": pickle.dumps(part), "test": pickle.dumps(part), "meta": names}
    serve(served, known, files, monkeypatch)
    monkeypatch.setattr(known, "train_list", [["train", md5(files["train"])]])
    monkeypatch.setattr(known, "test_list", [["test", md5(files["test"])]])
    monkeypatch.setattr(known, "meta", known.meta | {"md5": md5(names)})
    data = CIFAR100(tmp_path / "data", validation_size=0)
    assert data.sizes == {"train": 120, "validation": 0, "test": 120}
    assert torch.equal(data.split("train").inputs, torch.from_numpy(pixels).view(-1, 3, 32, 32))
    assert data.split("test").labels.tolist() == part["fine_labels"]
    assert (data.num_classes, CIFAR100.class_names) == (100, tuple(sorted(CIFAR100.class_names)))


def test_fashion_mnist_is_downloaded_beside_mnist(mnist: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = torchvision.datasets.FashionMNIST
    monkeypatch.setattr(known, "resources", torchvision.datasets.MNIST.resources)
    monkeypatch.setattr(known, "mirrors", torchvision.datasets.MNIST.mirrors)
    data = FashionMNIST(tmp_path / "data")
    assert data.sizes["test"] == 20
    assert (tmp_path / "data" / "FashionMNIST" / "raw").is_dir()
    assert [name.lower() for name in known.classes[:2]] == ["t-shirt/top", "trouser"]
    assert len(known.classes) == data.num_classes


def test_corrupt_archive_is_named_with_its_sum(cifar: bytes, served: Path, tmp_path: Path) -> None:
    (served / Source.filename).write_bytes(cifar[:-100])
    archive = tmp_path / "data" / Source.filename
    message = refuse(CIFAR10(tmp_path / "data"))
    assert f"{archive} is corrupt or incomplete (its MD5 sum is {md5(cifar[:-100])}, not {md5(cifar)})" in message
    (served / Source.filename).write_bytes(cifar)
    assert CIFAR10(tmp_path / "data").sizes["test"] == 20  # and is fetched anew


def test_damaged_extracted_cifar_is_extracted_anew(cifar: bytes, tmp_path: Path) -> None:
    CIFAR10(tmp_path).prepare_data()
    (tmp_path / Source.base_folder / "data_batch_2").write_bytes(b"junk")
    assert CIFAR10(tmp_path, validation_size=0).sizes["train"] == 55


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("junk", [b"junk", b"", bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2])])
def test_junk_in_extracted_mnist_is_one_clear_line(mnist: None, tmp_path: Path, name: str, junk: bytes) -> None:
    MNIST(tmp_path).prepare_data()
    folder = tmp_path / "MNIST" / "raw"
    (folder / name).write_bytes(junk)
    assert refuse(MNIST(tmp_path)).startswith(
        f"data.root {tmp_path}: expected intact files of MNIST; those in {folder} are damaged ("
    )


@pytest.mark.parametrize("kind", [CIFAR10, MNIST])
def test_a_silent_server_is_given_up(
    kind: type[TorchvisionData], silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchvision_data, "PATIENCE", 0.5)
    monkeypatch.setattr(Source, "url", silent + Source.filename)
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [silent])
    message = refuse(kind(tmp_path))
    assert message.startswith(f"data.root {tmp_path}: expected {kind.__name__} there; it is not, and downloading it")
    assert silent in message
    assert "timed out" in message
    assert str(tmp_path) in message.split("Put ")[1]
    assert message.endswith("or take `data Digits`, which needs no download")
    assert socket.getdefaulttimeout() is None


def test_the_limit_holds_however_many_addresses_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2 * torchvision_data.PATIENCE < 20
    monkeypatch.setattr(torchvision_data, "PATIENCE", 0.5)

    def look_up(*args: object) -> None:
        time.sleep(5)
        raise socket.gaierror("too late")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    start = time.monotonic()
    message = refuse(CIFAR10(tmp_path))
    assert time.monotonic() - start < 3
    assert "nothing came for 0.5 seconds" in message


def test_a_download_that_goes_on_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_data, "PATIENCE", 1.0)  # ten times what lies between two bytes

    def slowly() -> None:
        for count in range(13):
            (tmp_path / "file").write_bytes(bytes(count))
            time.sleep(0.1)

    torchvision_data.fetch(slowly, [tmp_path])
    assert (tmp_path / "file").stat().st_size == 12


@pytest.mark.parametrize("kind", [CIFAR10, MNIST])
def test_without_name_servers_it_helps(
    kind: type[TorchvisionData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*args: object) -> None:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    data = kind(tmp_path / "missing" / "data")
    message = refuse(data)
    assert not any(tmp_path.iterdir())
    assert "Temporary failure in name resolution" in message
    for text in (*data.origin().addresses, *(path.name for path, _ in data.origin().archives), "`data Digits`"):
        assert text in message


def test_a_root_that_cant_be_written_or_lacks_the_data_is_named(cifar: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"expected MNIST in .*MNIST/raw; prepare_data\(\) downloads it"):
        MNIST(tmp_path).setup()
    message = refuse(CIFAR10(tmp_path / "file" / "data"))
    assert message.startswith(f"data.root {tmp_path}/file/data: expected CIFAR10 there")
    assert "Not a directory" in message


def test_a_terminal_sees_progress(
    cifar: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    CIFAR10(tmp_path / "data").prepare_data()
    assert "100%" in capsys.readouterr().err
