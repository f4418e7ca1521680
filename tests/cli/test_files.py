"""What stands at a path that is written to stays what it is: a link, a pipe, a file."""

import os
import subprocess
import sys
import threading

import pytest

from leannorm._errors import InputError
from leannorm._files import check_writable, write_text

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no links and pipes as here")


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    target, link = tmp_path / "elsewhere" / "real.json", tmp_path / "link.json"
    target.parent.mkdir()
    link.symlink_to(target)
    for text in ("first", "second"):  # no target at first
        write_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert os.listdir(target.parent) == ["real.json"]


def test_a_link_into_no_folder_is_refused_before_the_work(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "nowhere" / "real.json")
    with pytest.raises(InputError, match=r"there is no folder '.*nowhere'"):
        check_writable(link)


def test_a_pipe_stays_and_has_the_text(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    check_writable(pipe)  # does not wait for a reader
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text(pipe, "all of it")
    assert pipe.is_fifo()
    reader.join(5)
    assert read == ["all of it"]
    assert os.listdir(tmp_path) == ["pipe"]


def test_standard_output_in_a_file_keeps_what_is_there(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    program = "from leannorm._files import write_text\nwrite_text('/dev/stdout', 'numbers')"
    with log.open("a") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    assert log.read_text() == "before\nnumbers"


@pytest.fixture
def umask():
    before = os.umask(0o077)
    yield os.umask
    os.umask(before)


def mode_of(path):
    return path.stat().st_mode & 0o777


def test_a_new_file_has_the_mode_that_open_gives(tmp_path, umask):
    for mask in (0o077, 0o022, 0o002):
        umask(mask)
        write_text(tmp_path / f"{mask:o}", "text")
        assert mode_of(tmp_path / f"{mask:o}") == 0o666 & ~mask
        assert umask(mask) == mask


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o640], ids=oct)
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "file"
    path.touch()
    path.chmod(mode)
    write_text(path, "text")
    assert mode_of(path) == mode
