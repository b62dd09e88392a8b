"""The documentation is right: its signatures are the code's, its examples run, and its links have targets."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import io
import re
import sys
import tomllib
import types
from contextlib import redirect_stdout
from pathlib import Path

import attrs
import pytest

import ejkernel_core
import ejkernel_ops
from ejkernel_core import _errors, _hooks
from ejkernel_tuning import clear_invocations
from tests.pages import blocks

ROOT = Path(__file__).parents[1]
PLUGIN_PROJECTS = sorted(ROOT.glob("plugins/*/pyproject.toml"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")])
#: Pages whose examples another test runs, or that have none that could run alone.
NOT_RUN_HERE = {
    "docs/pallas-tpu.md": "plugins/pallas_tpu/tests/test_pallas_tpu_page.py",
    "docs/tutorials/decoding-a-model.md": "tests/test_models_from_elsewhere.py",
    "docs/triton.md": "plugins/triton/tests/test_triton_page.py",
    "docs/writing-an-operation.md": "tests/test_operation_tutorial.py",
    "plugins/testing/README.md": "tests/test_tutorial.py",  # the test module of the plugin that is built there
}

#: Line breaks do not matter, and "..." stands for any text.
DOCTEST_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def has_examples(page: Path) -> bool:
    return any(language == "python" for _, language, _ in blocks(page))


def run(page: Path) -> None:
    """Run the python blocks in one namespace. A text block that follows one has its output."""
    module = sys.modules[page.stem] = types.ModuleType(
        page.stem
    )  # code of the page finds its module by name, as in a script
    output = ""
    for line, language, content in blocks(page):
        if language == "python" and not content.startswith("# test_"):  # a plugin's tests, which test_tutorial runs
            output = run_block(page, line, content, vars(module))
        elif language == "text" and output:
            is_equal = doctest.OutputChecker().check_output(content, output, DOCTEST_OPTIONS)
            assert is_equal, f"{name_of(page)}:{line} shows\n{content}\nbut this is printed\n{output}"
            output = ""


def run_block(page: Path, line: int, content: str, namespace: dict[str, object]) -> str:
    tree = ast.increment_lineno(ast.parse(content), line - 1)  # so that a traceback points into the page
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, page, "exec", dont_inherit=True), namespace)
    return out.getvalue()


PAGES_WITH_EXAMPLES = [name_of(page) for page in PAGES if has_examples(page) and name_of(page) not in NOT_RUN_HERE]
#: Those whose examples are tuned, or are many.
LONG_PAGES = {
    "docs/decoding.md",
    "docs/from-ejkernel.md",
    "docs/index.md",
    "docs/several-devices.md",
    "docs/several-processes.md",
    "docs/tuning.md",
    "docs/operations/flash_attention.md",
    "docs/tutorials/layers-in-a-scan.md",
    "docs/tutorials/packed-training.md",
    "docs/tutorials/publishing-records.md",
    "docs/tutorials/several-devices.md",
    "docs/tutorials/training-loop.md",
    "docs/tutorials/tuning-a-model.md",
}


def test_the_lists_name_pages_with_examples():
    assert {*LONG_PAGES} <= {*PAGES_WITH_EXAMPLES}
    assert all(has_examples(ROOT / page) and (ROOT / test).is_file() for page, test in NOT_RUN_HERE.items())


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.long] * (page in LONG_PAGES)) for page in PAGES_WITH_EXAMPLES]
)
def test_examples_run(page):
    clear_invocations()  # of tests before
    run(ROOT / page)


def test_a_wrong_example_is_caught(tmp_path, monkeypatch):
    """The check finds code that fails, and output that differs."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run(page)
    page.write_text("```python\nprint('one')\n```\n\n```text\ntwo\n```\n")
    with pytest.raises(AssertionError, match="page.md:6 shows"):
        run(page)


# -- commands and files ---------------------------------------------------------------------------------------------

PROJECTS = {file.parent: tomllib.loads(file.read_text()) for file in [ROOT / "pyproject.toml", *PLUGIN_PROJECTS]}
DISTRIBUTIONS = {project["project"]["name"]: project["project"] for project in PROJECTS.values()}
TARGETS = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
SUBCOMMANDS = {
    name for project in DISTRIBUTIONS.values() for name in project.get("entry-points", {}).get("ejkernel.commands", {})
}


def commands(page: Path) -> list[str]:
    """The lines of the shell blocks, without comments."""
    text = "\n".join(content for _, language, content in blocks(page) if language == "shell")
    return [line for line in (line.partition(" #")[0].strip() for line in text.splitlines()) if line]


def fault_of(command: str) -> str | None:
    """What a command names that does not exist; None if all of it does."""
    words = [word.strip("\"'") for word in command.split()]
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if words[0] == "make":
        return next((f"make {word}" for word in words[1:] if "=" not in word and word not in TARGETS), None)
    if words[0] == "ejkernel":
        return None if words[1] in SUBCOMMANDS or words[1].startswith("-") else command
    if words[:2] == ["python", "-m"] and words[2].startswith("ejkernel"):
        return None if importlib.util.find_spec(words[2]) else command
    if words[:2] == ["pip", "install"]:
        return next(filter(None, map(fault_of_requirement, words[2:])), None)
    return None


def fault_of_requirement(word: str) -> str | None:
    name, _, extras = word.rstrip("]").partition("[")
    if not name.startswith("ejkernel-"):
        return None
    known = DISTRIBUTIONS.get(name, {"optional-dependencies": {}}).get("optional-dependencies", {})
    return None if name in DISTRIBUTIONS and all(e in known for e in extras.split(",") if e) else word


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_name_what_there_is(page):
    assert list(filter(None, map(fault_of, commands(page)))) == []


@pytest.mark.parametrize(
    "command",
    [
        "make everything",
        "ejkernel frobnicate",
        "EJKERNEL_PLUGINS= python -m ejkernel_nothing",
        'pip install "ejkernel-core[gpu]"',
        "pip install ejkernel-cach",
    ],
)
def test_a_command_that_does_not_exist_is_found(command):
    assert fault_of(command)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_toml_is_valid(page):
    for _, language, content in blocks(page):
        if language == "toml":
            tomllib.loads(content)


# -- the hooks ----------------------------------------------------------------------------------------------------


def hooks() -> dict[str, str]:
    """The signature of each hook, as text, by the hook's name."""
    specs = {name: value for name, value in vars(_hooks).items() if hasattr(value, f"{_hooks.PROJECT}_spec")}
    return {name: name + str(inspect.signature(hook)).replace("'", "") for name, hook in specs.items()}


def sections(page: Path) -> dict[str, str]:
    """The text of each section whose heading is code, by that code."""
    parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    return {heading.strip("`"): body for heading, body in zip(parts[1::2], parts[2::2], strict=True) if "`" in heading}


def test_the_hooks_are_found():
    assert set(hooks()) >= {"heuristic_cfg", "config_space", "run_backend", "select_config"}


def test_the_hooks_page_has_a_heading_for_every_hook():
    assert list(sections(ROOT / "docs/hooks.md")) == list(hooks().values())


def test_every_hook_has_an_example():
    for signature, body in sections(ROOT / "docs/hooks.md").items():
        name = signature.partition("(")[0]
        assert f"@hookimpl\ndef {name}(" in body, f"no example implements {name}"


# -- the rest of the pages ----------------------------------------------------------------------------------------


def test_the_page_lists_every_error():
    text = (ROOT / "docs/errors.md").read_text()
    errors = [n for n, value in vars(_errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
    assert errors
    assert [name for name in errors if f"`{name}`" not in text] == []


def test_the_page_describes_every_parameter_of_flash_attention():
    from ejkernel_ops import flash_attention

    text = (ROOT / "docs/operations/flash_attention.md").read_text()
    table = text.partition("## Arguments")[2].partition("## Definition")[0]
    assert [name for name in inspect.signature(flash_attention).parameters if f"`{name}`" not in table] == []


def table_rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables, without those of headings."""
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_the_page_has_the_default_of_every_parameter_of_a_norm(name):
    parameters = inspect.signature(getattr(ejkernel_ops, name)).parameters.values()
    expected = {f"`{p.name}`": "required" if p.default is p.empty else f"`{p.default!r}`" for p in parameters}
    text = (ROOT / f"docs/operations/{name}.md").read_text().partition("## Definition")[0]
    assert {row[0]: row[-1] for row in table_rows(text)} == expected


@pytest.mark.parametrize("name", ["flash_attention", "layer_norm", "rms_norm"])
def test_the_page_has_the_fields_of_every_configuration(name):
    """Kernels without a ``Config``, or with one that has no fields, are not in the table."""
    expected = []
    for op in (name, f"{name}_bwd", f"{name}_quantized"):
        for kernel in (ejkernel_core.registry.kernel(op, backend) for backend in ejkernel_core.registry.backends(op)):
            if kernel.config_type and attrs.fields(kernel.config_type):
                fields = ", ".join(f"`{field.name}`" for field in attrs.fields(kernel.config_type))
                expected.append([f"`{kernel.name}`", f"`{kernel.config_name}`", fields])
    text = (ROOT / f"docs/operations/{name}.md").read_text().partition("## Configurations")[2].partition("\n## ")[0]
    assert sorted(table_rows(text)) == sorted(expected)


def figures(text: str) -> set[str]:
    return {figure.rstrip(".,") for figure in re.findall(r"\d[\d.,]*", re.sub(r"\d{4}-\d\d-\d\d", "", text))}


MEASUREMENTS = [page for page in sorted(ROOT.glob("docs/measurements/*.md")) if page.stem != "index"]


def test_the_figures_of_today_are_those_of_the_measurements():
    today = (ROOT / "docs/performance.md").read_text()
    in_tables = figures("\n".join(line for line in today.splitlines() if line.startswith("|")))
    assert len(in_tables) > 50
    assert sorted(in_tables - figures("\n".join(page.read_text() for page in MEASUREMENTS))) == []


def test_the_first_page_of_the_measurements_has_all_of_them():
    first_page = (ROOT / "docs/measurements/index.md").read_text()
    assert [page.name for page in MEASUREMENTS if f"]({page.name}) |" not in first_page] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_have_targets(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        target_page = page.parent / path if path else page
        assert target_page.exists(), f"{target} in {name_of(page)}"
        assert not anchor or anchor in anchors(target_page), f"{target} in {name_of(page)}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_not_too_long(page):
    """Headings and rows of a table may be longer."""
    lines = [line for line in page.read_text().splitlines() if not line.startswith(("|", "#"))]
    assert [line for line in lines if len(line) > 120] == []


def lines_cut_off_by_the_site(page: Path) -> list[str]:
    """The lines of code that the site does not show as a whole. What programs print may be wider."""
    return [
        line
        for block in blocks(page)
        if block.language not in ("", "text")
        for line in block.content.splitlines()
        if len(line) > 88
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_site_shows_whole_lines_of_code(page):
    assert lines_cut_off_by_the_site(page) == []


def test_a_line_that_is_cut_off_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("".join(f"```{name}\n{name} = {'x' * 88}\n```\n" for name in ("python", "shell", "toml", "text")))
    assert [line.partition(" ")[0] for line in lines_cut_off_by_the_site(page)] == ["python", "shell", "toml"]


# -- docstrings ---------------------------------------------------------------------------------------------------

DOCUMENTED = [
    "ejkernel_ops.flash_attention",
    "ejkernel_ops.flash_attention.tokens",
]


def modules_with_doctests() -> list[str]:
    """The modules of the core, agreement, command, operations, classes, context, proofs and tuner that have an example in a docstring."""
    packages = {
        "ejkernel_core": ROOT,
        **{
            f"ejkernel_{name}": ROOT / "plugins" / name
            for name in ("agree", "classes", "cli", "context", "ops", "testing", "tuning")
        },
    }
    modules = []
    for package, folder in packages.items():
        for file in sorted((folder / package).rglob("*.py")):
            if ">>> " in file.read_text():
                modules.append(".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"))
    return modules


def test_the_doctests_are_found():
    assert set(DOCUMENTED) <= set(modules_with_doctests())


@pytest.mark.parametrize("module", modules_with_doctests())
def test_doctests(module):
    results = doctest.testmod(importlib.import_module(module), verbose=False)
    assert results.attempted
    assert not results.failed


#: The packages that users import from. The examples of ``ejkernel_packed`` run in its own tests.
PUBLIC = [
    "ejkernel_agree",
    "ejkernel_classes",
    "ejkernel_context",
    "ejkernel_core",
    "ejkernel_testing",
    "ejkernel_tuning",
    "ejkernel_ops",
    "ejkernel_ops.calibration",
    "ejkernel_ops.numerics",
    "ejkernel_ops.testing",
    "ejkernel_packed",
]


def functions_without_example(module: types.ModuleType) -> list[str]:
    """The public functions of a module whose docstrings have no example that calls them."""
    functions = [name for name in module.__all__ if inspect.isfunction(inspect.unwrap(getattr(module, name)))]
    assert functions, f"{module.__name__} has no public functions"
    lines = {name: (inspect.getdoc(getattr(module, name)) or "").splitlines() for name in functions}
    return [
        name
        for name in functions
        if not any(line.strip().startswith((">>> ", "... ")) and f"{name}(" in line for line in lines[name])
    ]


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_function_has_an_example(module):
    assert functions_without_example(importlib.import_module(module)) == []


def test_the_example_of_every_public_function_is_run():
    """Each function is defined in a module whose doctests run above or in the tests of ``ejkernel_packed``."""
    modules = modules_with_doctests()
    for module in map(importlib.import_module, PUBLIC):
        for name in module.__all__:
            function = inspect.unwrap(getattr(module, name))
            if inspect.isfunction(function):
                assert function.__module__ in modules or "ejkernel_packed." in function.__module__, name


def test_a_missing_example_is_found():
    module = types.ModuleType("module")
    module.__all__, module.with_one, module.without = ["with_one", "without"], lambda: None, lambda: None
    module.with_one.__doc__, module.without.__doc__ = ">>> with_one()", ">>> something_else()"
    assert functions_without_example(module) == ["without"]
