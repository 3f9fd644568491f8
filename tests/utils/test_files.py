"""Files are written completely or not at all, and each numbered folder is taken once."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchcaps.utils import files
from torchcaps.utils.files import take_folder, write_files_whole, write_whole


def full(unfinished: Path) -> None:
    unfinished.write_text("ha")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(unfinished))


def test_a_file_is_there_when_it_is_whole(tmp_path):
    path = tmp_path / "new" / "folder" / "file.txt"

    def write(unfinished: Path) -> None:
        unfinished.write_text("all")
        assert not path.exists()
        assert unfinished.parent == path.parent  # on the same disk

    assert write_whole(path, write) == path
    assert path.read_text() == "all"
    assert [found.name for found in path.parent.iterdir()] == ["file.txt"]


def test_what_fails_leaves_what_was(tmp_path):
    path = tmp_path / "file.txt"
    for earlier in ([], ["earlier"]):
        if earlier:
            path.write_text("earlier")
        with pytest.raises(OSError, match=f"^cannot write {path}: No space left on device$"):
            write_whole(path, full)
        with (
            pytest.raises(OSError, match=f"^cannot write {path}: No space left on device$"),
            write_files_whole(path) as unfinished,
        ):
            full(unfinished)
        assert [file.read_text() for file in tmp_path.iterdir()] == earlier


def test_the_error_of_a_write_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, disk = Path("file.txt"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def of_torch(unfinished: Path) -> None:
        try:
            raise disk
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:672]")  # noqa: B904

    with pytest.raises(OSError, match=r"^cannot write file.txt: No space left on device$"):
        write_whole(path, of_torch)
    with pytest.raises(FileNotFoundError, match=r"^\[Errno 2\] No such file or directory: '/gone/for/ever'$"):
        write_whole(path, lambda unfinished: Path("/gone/for/ever").read_text())  # it names its own file
    with pytest.raises(RuntimeError, match="^out of memory$"):
        write_whole(path, lambda unfinished: (_ for _ in ()).throw(RuntimeError("out of memory")))
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"^cannot write file.txt: it is not a regular file$"):
        files.write_text_whole(path, "text")
    with pytest.raises(OSError, match=r"^cannot write file.txt: it is not a regular file$"), write_files_whole(path):
        pass
    assert [*Path().rglob("*")] == [path]
    assert path.is_fifo()


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper" / "still"):
        with pytest.raises(OSError, match=f"^cannot make the folder {folder}: {tmp_path}/file is a file, and must be"):
            take_folder(folder, "version")
    with pytest.raises(OSError, match="^cannot make the folder .*: File name too long$"):
        files.make_folder(tmp_path / ("a" * 5000))


def test_what_a_killed_process_left_is_written_over(tmp_path):
    left = []
    write_whole(tmp_path / "file.txt", lambda unfinished: (left.append(unfinished), unfinished.touch()))
    assert left[0].name.startswith(".")
    left[0].write_text("a half that is longer than the whole")
    write_whole(tmp_path / "file.txt", lambda unfinished: unfinished.write_text("all"))
    assert [file.read_text() for file in tmp_path.iterdir()] == ["all"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    did = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (did.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(Path, "replace", lambda *paths: (did.append("replace"), replace(*paths)))
    write_whole(tmp_path / "file.txt", lambda unfinished: unfinished.write_text("all"))
    assert did[:2] == ["fsync", "replace"]
    assert did[2:] == ["fsync"] * (os.name == "posix")  # the folder


def test_folders_are_numbered(tmp_path):
    taken = [take_folder(tmp_path / "runs", kind).name for kind in ("version", "version", "smoke", "version")]
    assert taken == ["version_0", "version_1", "smoke_0", "version_2"]
    for name in (
        "version_3",
        "version_12",
        "version_²",
        "version_٩٩",
        "version_9_9",
        f"version_{'9' * 99}",
        "version_of_the_first_process",
        "version_",
        "versions_40",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "version_13").touch()
    assert take_folder(tmp_path, "version").name == "version_14"  # it counts on from the highest


def test_a_folder_that_another_takes_meanwhile_is_left_to_it(tmp_path, monkeypatch):
    glob = Path.glob
    others = iter(["version_0", "version_1"])

    def late(path: Path, pattern: str):
        found = list(glob(path, pattern))
        for other in others:
            (path / other).mkdir()
        return found

    monkeypatch.setattr(Path, "glob", late)
    assert take_folder(tmp_path, "version").name == "version_2"


def test_processes_take_different_folders(tmp_path):
    take = "import runpy, sys; take = runpy.run_path(sys.argv[1])['take_folder']; from pathlib import Path; input(); "
    take += "print(*(take(Path(sys.argv[2]), 'version').name for _ in range(50)))"
    command = [sys.executable, "-c", take, files.__file__, str(tmp_path / "runs")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    taken = [name for process in processes for name in process.communicate(timeout=60)[0].split()]
    assert sorted(taken) == sorted(f"version_{number}" for number in range(150))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as JSON: Expecting value"),
        (b"\xff\xfe", "is not a text in UTF-8 (byte 0)"),
        (b"[" * 100_000, "cannot be read as JSON: its values are nested too deeply"),
        (b'{"a":' * 60 + b"1" + b"}" * 60, "cannot be read as JSON: its values are nested too deeply"),
        (b"[1]", "cannot be used: expected an object in JSON, got [1]"),
        (b" " * 5_000_000, "cannot be read: it is larger than 4,000,000 bytes"),
        (b"1" * 5000, "cannot be read as JSON: Exceeds the limit"),
    ],
    ids=("empty", "bytes", "brackets", "deep", "array", "large", "digits"),
)
def test_a_small_file_that_anybody_wrote(tmp_path, content, message):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path} {message}')}[^\n]*$"):
        files.read_json(path, dict)
    path.write_text('\ufeff{"a": [1, {"b": null}]}', encoding="utf-8")  # some editors begin with this mark
    assert files.read_json(path, dict) == {"a": [1, {"b": None}]}


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in {
        "fifo": "it is not a regular file",
        "loop": os.strerror(errno.ELOOP),
        "none": os.strerror(errno.ENOENT),
        ".": os.strerror(errno.EISDIR),
        "nul\0": "embedded null byte",
        "a" * 5000: os.strerror(errno.ENAMETOOLONG),
    }.items():
        with pytest.raises(ValueError, match=re.escape(f"cannot be read: {reason}")):
            files.read_json(tmp_path / name, dict)


@pytest.mark.parametrize("text", [None, 3, b"{}", "[" * 100_000, "NaN"])
def test_a_text_in_json_that_a_checkpoint_has(text):
    with pytest.raises(ValueError, match="^last.ckpt: its values cannot be "):
        files.parse_json(text, "last.ckpt: its values", dict)
