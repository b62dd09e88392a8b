"""``ejkernel tpu`` where there is no compiler for TPUs; with one, `make tpu-check` runs it."""

from __future__ import annotations

import importlib.metadata

import pytest

from ejkernel_cli import main
from ejkernel_pallas_tpu.testing import _compiler, _parts


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """The exit code, and what is printed to both streams."""
    with pytest.raises(SystemExit) as exit_:
        main(["tpu", *words])
    captured = capsys.readouterr()
    return exit_.value.code, captured.out, captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--generation", "v9"], "no generation is called 'v9'; there are v4, v5e"),
        (["fit"], "'fit' is not one of 'fits', 'sharded', 'estimates'"),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, _, error = run(capsys, *words)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


def test_without_the_compiler_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError("libtpu")

    monkeypatch.setattr(_compiler, "version", version)
    code, _, error = run(capsys, "sharded")
    assert code == 1
    assert error == ("ejkernel: libtpu is not installed; the compiler for TPUs comes with 'pip install \"jax[tpu]\"'\n")


class CompilerDouble:
    """Started and stopped, and nothing else."""

    is_stopped = False

    @classmethod
    def start(cls) -> CompilerDouble:
        return cls()

    def stop(self) -> None:
        CompilerDouble.is_stopped = True


def test_the_parts_are_run_for_each_generation_and_faults_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(name: str, faults: int) -> object:
        def check(compiler: object, generation: str, text: str, report: object) -> int:
            report(f"{name} {generation} {text}")  # type: ignore[operator]
            return faults

        return check

    monkeypatch.setattr(_parts, "versions", lambda: "versions")
    monkeypatch.setattr(_parts, "Compiler", CompilerDouble)
    monkeypatch.setattr(_parts, "PARTS", {"fits": part("fits", 0), "sharded": part("sharded", 2)})
    code, output, _ = run(capsys, "fits", "--generation", "v5e", "--generation", "v4", "--call", "H16")
    assert (code, output) == (0, "versions\nfits v5e H16\nfits v4 H16\nright\n")
    assert CompilerDouble.is_stopped
    code, output, _ = run(capsys, "--generation", "v5e")
    assert (code, output.splitlines()[1:]) == (1, ["fits v5e ", "sharded v5e ", "2 wrong"])
