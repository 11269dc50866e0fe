"""The package's shape, read with ast: who imports whom, who writes files, how long things are."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import ooc_embed

PACKAGE = Path(inspect.getfile(ooc_embed)).parent
MODULES = {path.stem: path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}

# Lowest first; a module may import those of the lines above its own.
LAYERS = (
    (
        "_version",
        "errors",
        "warning",
        "initializers",
        "poincare",
        "interrupts",
        "ids",
        "parsing",
        "search",
        "arguments",
        "card",
        "gradients",
        "memory",
        "cgroups",
        "stats",
        "progress",
    ),
    ("disk_facts",),
    ("durable", "guard", "behind", "rule"),
    ("riemannian",),
    ("rules",),
    ("fused",),
    ("mapped", "blocks", "lock"),
    ("cache", "log"),
    ("history", "merge", "places"),
    ("manifest",),
    ("arrays", "claim"),
    ("archive",),
    ("store",),
    ("soundness", "bulk", "logs", "snapshot", "archive_folder", "single_file"),
    ("merging", "moving"),
    ("chunks", "salvage"),
    ("stored",),
    ("storage",),
    ("evictor",),
    ("fetcher", "touched"),
    ("opened",),
    ("table",),
    ("optimizer", "views", "sources", "description"),
    ("passes", "creation", "checkpoint", "footprint", "inspectable"),
    ("conversion", "reader"),
    ("module",),
    ("layer",),
    ("embedding", "embedding_bag", "clipping", "restoring"),
    ("replacement", "exporting", "importing", "archive_embedding"),
    ("lookahead",),
)
CORE = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# They measure disks and draw figures, and never have a store's file open themselves.
MEASURING = (
    "bench",
    "bench_all",
    "bench_archive",
    "bench_cold",
    "bench_commit",
    "bench_growth",
    "bench_hot",
    "bench_lookahead",
    "bench_merge",
    "bench_rules",
    "calibration",
    "direct_queue",
    "disk_rates",
    "figures",
    "memory_limit",
    "references",
    "timing",
    "workloads",
)

WRITING_OS = {
    "rename",
    "replace",
    "renames",
    "unlink",
    "remove",
    "rmdir",
    "removedirs",
    "mkdir",
    "makedirs",
    "link",
    "symlink",
    "fsync",
    "fdatasync",
    "sync",
    "truncate",
    "ftruncate",
    "write",
    "writev",
    "pwrite",
    "pwritev",
    "posix_fallocate",
    "sendfile",
    "copy_file_range",
    "chmod",
    "utime",
    "open",
}
WRITING_METHODS = {
    "unlink",
    "write_text",
    "write_bytes",
    "touch",
    "rmdir",
    "mkdir",
    "tofile",
    "hardlink_to",
}
WRITING_SHUTIL = {"rmtree", "move", "copy", "copy2", "copyfile", "copytree", "copyfileobj"}


def imports(name: str) -> set[str]:
    """The modules of the package that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").startswith("ooc_embed")
        ):
            module = (node.module or "").removeprefix("ooc_embed").lstrip(".")
            names = [module.split(".")[0]] if module else [alias.name for alias in node.names]
            found.update(names)
        elif isinstance(node, ast.Import):
            found.update(
                alias.name.split(".")[1]
                for alias in node.names
                if alias.name.startswith("ooc_embed.")
            )
    return found & set(MODULES) - {"__init__"}


def outside_imports(name: str) -> set[str]:
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
    return found


@pytest.mark.parametrize("name", sorted(set(CORE) & set(MODULES)))
def test_a_core_module_imports_only_from_layers_below_its_own(name: str) -> None:
    for imported in imports(name):
        assert imported in CORE, f"{name} imports {imported}, which stands above the core"
        assert CORE[imported] < CORE[name], f"{name} imports {imported}, which is not below it"


def test_no_modules_import_each_other_in_a_circle() -> None:
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " → ".join([*above, name])
        if name not in done:
            for imported in imports(name):
                visit(imported, (*above, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_only_two_modules_import_zarr_among_core_modules() -> None:
    assert [name for name in CORE if name in MODULES and "zarr" in outside_imports(name)] == [
        "arrays",
        "archive",
    ]


@pytest.mark.parametrize("name", ["errors", "durable", "store"])
def test_modules_that_know_only_files_do_not_import_torch(name: str) -> None:
    assert "torch" not in outside_imports(name)


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _opens_to_write(call: ast.Call, method: bool) -> bool:
    modes = [word.value for word in call.keywords if word.arg == "mode"]
    modes += call.args[0:1] if method else call.args[1:2]
    constants = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
    return any(isinstance(mode, str) and set(mode) & set("wax+") for mode in constants)


def writing(call: ast.Call) -> str:
    """What this call changes on a disk, or nothing."""
    function = call.func
    if isinstance(function, ast.Name):
        return "open()" if function.id == "open" and _opens_to_write(call, method=False) else ""
    if not isinstance(function, ast.Attribute):
        return ""
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    name = function.attr
    if owner == "os" and name in WRITING_OS:
        flags = ast.dump(ast.Module(body=[ast.Expr(arg) for arg in call.args[1:]], type_ignores=[]))
        if name == "open" and not any(word in flags for word in ("O_RDWR", "O_WRONLY", "O_CREAT")):
            return ""
        return f"os.{name}"
    if owner == "shutil" and name in WRITING_SHUTIL:
        return f"shutil.{name}"
    if owner == "fcntl":
        return f"fcntl.{name}"
    if owner not in ("os", "shutil", "durable", "DiskEmbedding", "cls") and name in WRITING_METHODS:
        return f".{name}()"
    is_file_open = name == "open" and owner not in ("zarr", "webbrowser")
    return ".open()" if is_file_open and _opens_to_write(call, method=True) else ""


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"durable", *MEASURING}))
def test_only_durable_changes_files(name: str) -> None:
    found = {what for call in calls(TREES[name]) if (what := writing(call))}
    assert found == ({"fcntl.flock"} if name == "lock" else set())


def test_the_search_for_writing_calls_finds_those_of_durable() -> None:
    found = {what for call in calls(TREES["durable"]) if (what := writing(call))}
    assert {"os.rename", "os.fsync", "os.pwrite", "os.posix_fallocate", "os.open"} <= found
    assert {".mkdir()", ".rmdir()", ".unlink()"} <= found


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_fits_in_one_sitting(name: str) -> None:
    assert len(MODULES[name].read_text().splitlines()) <= 400


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_function_is_about_forty_lines(name: str) -> None:
    """From its first statement behind the docstring to its last line."""
    long = []
    for function in functions(TREES[name]):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        if body and (lines := (body[-1].end_lineno or 0) - body[0].lineno + 1) > 50:
            long.append((function.name, lines))
    assert long == []


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_first_line_of_a_module_says_what_it_is_for(name: str) -> None:
    docstring = ast.get_docstring(TREES[name])
    assert docstring
    first = docstring.splitlines()[0]
    assert len(first) > 20
    assert MODULES[name].read_text().splitlines()[0].startswith('"""')


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_except_catches_whatever_comes_and_keeps_it(name: str) -> None:
    """A bare or catch-all handler must raise again, as the clean-up of a failed write does."""
    for node in ast.walk(TREES[name]):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.id if isinstance(node.type, ast.Name) else "" if node.type else "bare"
        if caught in ("bare", "Exception", "BaseException"):
            assert any(isinstance(inner, ast.Raise) for inner in ast.walk(node)), node.lineno


@pytest.mark.parametrize("name", sorted(MODULES))
def test_nothing_in_the_package_sleeps_or_asserts_a_users_mistake(name: str) -> None:
    for node in ast.walk(TREES[name]):
        assert not (isinstance(node, ast.Attribute) and node.attr == "sleep"), node.lineno
        assert not isinstance(node, ast.Assert), node.lineno


PUBLIC = {
    "Adagrad",
    "ArchiveEmbedding",
    "CorruptStoreError",
    "Description",
    "DiskEmbedding",
    "DiskEmbeddingBag",
    "FormatError",
    "LockedError",
    "Normal",
    "Plan",
    "Replacement",
    "RiemannianAdam",
    "RiemannianSGD",
    "RowwiseAdagrad",
    "SGD",
    "SparseAdam",
    "Stats",
    "StoreError",
    "TableReader",
    "Uniform",
    "Zeros",
    "clip_grad_norm_",
    "describe",
    "export_table",
    "freeze_table",
    "import_table",
    "lookahead",
    "open_table",
    "plan",
    "plots",
    "poincare",
    "replace_embeddings",
    "rollback",
}


def test_all_names_are_the_public_api() -> None:
    assert set(ooc_embed.__all__) >= PUBLIC
    assert set(ooc_embed.__all__) - PUBLIC <= {"RowView", "__version__"}
    assert len(ooc_embed.__all__) == len(set(ooc_embed.__all__))
    public = {
        name
        for name, value in vars(ooc_embed).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public == set(ooc_embed.__all__) - {"__version__", "plots", "poincare"}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_has_a_docstring(name: str) -> None:
    value = getattr(ooc_embed, name)
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}("), "the docstring is the dataclass's default"
    if name == "DiskEmbedding":
        methods = [m for n, m in inspect.getmembers(value, inspect.isfunction) if n in vars(value)]
        methods = [method for method in methods if not method.__name__.startswith("_")]
        missing = [method.__qualname__ for method in methods if not inspect.getdoc(method)]
        assert missing == []
