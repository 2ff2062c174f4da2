"""What the commands of one process share: exit codes and the one line that goes with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch._command import exit_code_of


def raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    "error, code, text",
    [
        (ValueError("no such run"), 2, "error: no such run\n"),
        (FileNotFoundError(2, "No such file", "a"), 2, "error: [Errno 2] No such file: 'a'\n"),
        (KeyboardInterrupt(), 130, "interrupted; go on later\n"),
    ],
)
def test_a_failure_is_one_line_and_a_code(capsys, error: BaseException, code: int, text: str):
    assert exit_code_of(lambda: raises(error), "interrupted; go on later") == code
    assert capsys.readouterr() == ("", text)


def test_success_is_silent_and_a_fault_of_ours_is_shown(capsys, tmp_path: Path) -> None:
    assert exit_code_of(lambda: (tmp_path / "done").touch()) == 0
    assert (tmp_path / "done").exists()
    assert capsys.readouterr() == ("", "")
    with pytest.raises(AssertionError):
        exit_code_of(lambda: raises(AssertionError()))
