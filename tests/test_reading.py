import hashlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recast.errors import RecastError, shown
from recast.json_text import parse_json
from recast.lab.cli.guard import one_line
from recast.lab.config import Recipe
from recast.lab.config.text import SEAL, load_recipe, save_recipe
from recast.lab.folder.files import read_text
from recast.lab.folder.tables import read_table
from recast.reading import read_bytes

BOMB = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, r"line 2 has an alias"),
        ("[" * 2000, "nested deeper than 32 levels"),
        ("seed: 1\nseed: 2", "'seed' stands twice"),
        ("optim: {lr: 1, lr: 2}", "'lr' stands twice"),
        ("seed: " + "9" * 5000, "5000 digits"),
        ("seed: " + "9" * 4000, r"seed must be <= 9223372036854775807, got 9+ … 9+$"),
        ("optim: {lr: 1e300}", "lr must be <= 1000000000, got '1e300'"),
        ("seed: !!bool x", "not what its tag says"),
        ("#" * 600_000, "larger than 512 KiB"),
        ("where: [\x1b]", "cannot read recipe"),
        ("\udcff", "no text in UTF-8"),
    ],
)
def test_hostile_recipes(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    begin = time.process_time()
    with pytest.raises(RecastError, match=message) as raised:
        load_recipe(path)
    assert len(str(raised.value)) < 1000
    assert time.process_time() - begin < 10


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("read", [load_recipe, read_text, read_table])
def test_what_is_no_file_is_not_waited_for(read: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    message = r"cannot read .*(a pipe or a device|symbolic links|Input/output|not permitted|denied)"
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path / "loop", tmp_path, "/proc/self/mem"):
        with pytest.raises(RecastError, match=message):
            read(path)


def test_no_more_is_read_than_the_limit(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 1024)
    assert read_bytes(tmp_path / "f", 1024) == b"x" * 1024
    with pytest.raises(RecastError, match="larger than 0 KiB"):
        read_bytes(tmp_path / "f", 1023)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"a": 1, "a": 2}', "has 'a' twice"),
        ("9" * 5000, "digits"),
        ("{", "truncated"),
    ],
)
def test_hostile_json(text: str, message: str) -> None:
    with pytest.raises(RecastError, match=f"f.json .*{message}"):
        parse_json(text, "f.json")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The recipe of a run."""
    save_recipe(Recipe(), tmp_path / "recipe.yaml")
    return tmp_path / "recipe.yaml"


def test_a_recipe_that_was_cut_short_is_refused_wherever_it_was_cut(saved: Path) -> None:
    text = saved.read_text(encoding="utf-8")
    assert load_recipe(saved, complete=True) == Recipe()
    for end in range(0, text.rindex(":", 0, text.index(SEAL)), 97):
        saved.write_text(text[:end], encoding="utf-8")
        with pytest.raises(RecastError, match=r"recipe\.yaml"):
            load_recipe(saved, complete=True)


def test_a_recipe_that_was_edited_is_refused(saved: Path) -> None:
    text = saved.read_text(encoding="utf-8")
    saved.write_text(text.replace("lr: 0.0001", "lr: 0.0003"), encoding="utf-8")
    with pytest.raises(RecastError, match=r"recipe\.yaml is not as the run wrote it: .* delete its last line"):
        load_recipe(saved, complete=True)
    with pytest.warns(UserWarning, match="it is taken as it stands"):  # the start of another run
        assert load_recipe(saved).optim.lr == 3e-4
    saved.write_text(saved.read_text(encoding="utf-8").rpartition("#")[0], encoding="utf-8")
    assert load_recipe(saved, complete=True).optim.lr == 3e-4  # meant


def test_a_recipe_of_another_version(saved: Path) -> None:
    body = saved.read_text(encoding="utf-8").rpartition(SEAL)[0].replace("max_tokens: 1024", "most_tokens: 1024")
    saved.write_text(f"{body}{SEAL}{hashlib.sha256(body.encode()).hexdigest()[:16]}\n", encoding="utf-8")
    with pytest.raises(RecastError, match="comes from another version of recast: unknown name most_tokens"):
        load_recipe(saved, complete=True)


def test_messages_are_short_and_hold_nothing_that_a_terminal_obeys() -> None:
    assert one_line("a\n\x1b[2Jb\x9b\u202e") == r"a \x1b[2Jb\x9b\u202e"
    assert len(one_line("x" * 5000)) <= 1000
    assert "\n" not in shown(np.zeros((2, 9)))
    assert shown(10**5000) == "a number of about 5,000 digits"
