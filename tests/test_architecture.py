"""The house: who may import whom, how long a file may be, what is public."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median

import pytest

import rlflow
from rlflow.compiler.checks import RULES

PACKAGE = Path(rlflow.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = Path(__file__).parent
MODULES = {
    ".".join(("rlflow", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in FILES
}
# The only files that use private names of libraries.
COMPAT = PACKAGE / "system" / "compat"

# The rooms in their order: each imports only rooms before it, and itself.
ROOMS = ["_version", "errors", "plugins", "extras", "schema", "system", "resources", "batch", "recipe", "engines"]
ROOMS += ["rewards", "environments", "agents", "nodes", "data", "compiler", "runtime", "report", "__init__", "commands"]
ROOMS += ["cli", "__main__"]
# The parts of resources in their order: each may import those before it.
PARTS_OF_RESOURCES = ["models", "cluster", "layout", "memory", "time", "demand", "workload", "planner"]
PARTS_OF_PLANNER = ["confidence", "hosts", "pools", "inputs", "placement_solver", "simulate", "candidate", "prediction"]
PARTS_OF_PLANNER += ["search"]
# The parts of runtime in their order; all its other files come last, and may import every part.
PARTS_OF_RUNTIME = ["protocols", "engine_specs", "objects", "generation", "weights", "ray"]
MODEL_LIBRARIES = {"torch", "transformers", "peft", "vllm", "deepspeed", "datasets", "safetensors", "tokenizers"}
# Names that a library does not document. vLLM's engine (v1) and its reloading of layers are internal too.
PRIVATE = re.compile(r"\._(?!_)|\.vllm\.v1\b|\.layerwise\b")
OWN = {"rlflow", "__future__", "_thread"}
# Imported by engines when they are built, never before.
LAZY = {
    "engines/causal_lm/attention.py",
    "engines/causal_lm/compilation.py",
    "engines/causal_lm/muon.py",
    "engines/causal_lm/routing.py",
    "engines/causal_lm/output_layer.py",
    "engines/sharded/experts.py",
    "engines/sharded/tensor_parallel.py",
    "engines/sharded/ulysses.py",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the imported modules; for ``from rlflow import room`` also the room."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield from (f"rlflow.{alias.name}" for alias in node.names if node.module == "rlflow")
            yield node.module


@cache
def module_imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in it and for types too."""
    imported = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= names & MODULES.keys() or {str(node.module)}
    return imported & MODULES.keys()


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside of functions count too, and those for types alone."""
    graph = {module: module_imports(path) - {module} for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files of a circle


def test_rooms_import_only_rooms_before_them() -> None:
    def order(module: str) -> int:
        return ROOMS.index(room(MODULES[module]))

    arrows = [(module, name) for module, path in MODULES.items() for name in module_imports(path)]
    assert [(module, name) for module, name in arrows if order(name) > order(module)] == []
    for parts, parent in (
        (PARTS_OF_RESOURCES, "rlflow.resources."),
        (PARTS_OF_PLANNER, "rlflow.resources.planner."),
        (PARTS_OF_RUNTIME, "rlflow.runtime."),
    ):
        # The files of a folder that are no part come last.
        places = {
            module: next(
                (parts.index(part) for part in parts if f"{module}.".startswith(f"{parent}{part}.")), len(parts)
            )
            for module in MODULES
            if module.startswith(parent)
        }
        inside = [(module, name) for module, name in arrows if {module, name} <= places.keys()]
        assert [(module, name) for module, name in inside if places[name] > places[module]] == []


def test_compiler_and_reports_name_no_class_of_a_node() -> None:
    """Rules and headlines of one algorithm stand in the file of its node."""
    files = [path for path in FILES if room(path) == "nodes" and path.stem not in ("base", "signature")]
    classes = {node.name for path in files for node in tree_of(path).body if isinstance(node, ast.ClassDef)}
    named = []
    for path in FILES:
        if room(path) not in ("compiler", "report"):
            continue
        named += [(path, module) for module in imports(nodes_of(path)) if module.startswith("rlflow.nodes.")]
        for node in nodes_of(path):
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "name", None)))
            named += [(path, name)] if name in classes else []
    assert {module for _, module in named} == {"rlflow.nodes.base"}, named


def test_only_the_stage_check_calls_checks() -> None:
    """All other stages compute; the stage itself is called where requirements are, and where a plan is read."""
    callers = []
    for path in FILES:
        if room(path) != "compiler" or path.is_relative_to(PACKAGE / "compiler" / "checks"):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                callers += [(path.stem, name)] if name.lstrip("_").startswith("check") else []
    assert callers == [("plan", "check"), ("problem", "check")]
    rules = {name for path in (PACKAGE / "compiler" / "checks").glob("*.py") for name in functions(path)}
    listed = {rule.__name__ for rule in RULES}
    assert {name for name in rules if name.startswith("check_")} == listed | {"check_run", "check_on_cluster"}


def functions(path: Path) -> set[str]:
    return {node.name for node in tree_of(path).body if isinstance(node, ast.FunctionDef)}


def test_engines_are_named_only_in_their_room() -> None:
    """Other rooms ask the registry for facts about an engine, so a new engine changes no other room."""
    engines = {"vllm", "deepspeed", "transformers", "torch", "fake"}
    for path in FILES:
        if room(path) not in ("compiler", "runtime", "resources", "nodes"):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Constant):
                assert node.value not in engines, (path, node.lineno)
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "arg", getattr(node, "name", None))))
            if isinstance(name, str) and not isinstance(node, ast.alias):
                assert not re.search("vllm|deepspeed|transformers|fake", name, re.IGNORECASE), (path, name)


def test_model_libraries_are_imported_when_needed() -> None:
    heavy = {}
    for path in FILES:
        at_the_top = {module.split(".")[0] for module in imports(tree_of(path).body)} & MODEL_LIBRARIES
        anywhere = {module.split(".")[0] for module in imports(nodes_of(path))} & {"ray"}
        name = str(path.relative_to(PACKAGE))
        may_use_ray = room(path) == "runtime" or path.is_relative_to(COMPAT)
        heavy[name] = (set() if name in LAZY else at_the_top) | (set() if may_use_ray else anywhere)
    assert {name: libraries for name, libraries in heavy.items() if libraries} == {}


def test_only_what_reads_recipes_sees_omegaconf() -> None:
    readers = [path for path in FILES if any(name.split(".")[0] == "omegaconf" for name in imports(nodes_of(path)))]
    assert {room(path) for path in readers if not path.is_relative_to(COMPAT)} == {"recipe", "commands"}


def test_private_names_of_libraries_are_used_in_one_place() -> None:
    """An upgrade of a library then breaks one file, whose contract test says which name it is."""
    wrong = []
    for path in FILES:
        if path.is_relative_to(COMPAT):
            continue
        for node in nodes_of(path):
            names = [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            foreign = [name for name in names if name.split(".")[0] not in OWN]
            wrong += [f"{path.relative_to(PACKAGE)}: {name}" for name in foreign if PRIVATE.search(f".{name}")]
        wrong += [f"{path.relative_to(PACKAGE)}: {name}" for name in foreign_private_names(path)]
    assert wrong == [], "give these a function in rlflow/system/compat and a line in tests/contract/test_compat.py"


def foreign_private_names(path: Path) -> Iterator[str]:
    """Yield the private attributes that no code of the same file defines, such as ``torch._C``."""
    nodes = [node for node in nodes_of(path) if isinstance(node, ast.Attribute) and PRIVATE.search(f".{node.attr}")]
    mine = {node.attr for node in nodes if ast.unparse(node.value) in ("self", "cls", "super()")}
    mine |= {node.name for node in nodes_of(path) if isinstance(node, ast.FunctionDef)}
    yield from (ast.unparse(node) for node in nodes if node.attr not in mine and ast.unparse(node) != "os._exit")


def test_sizes() -> None:
    lengths = {path.relative_to(PACKAGE): len(path.read_text().splitlines()) for path in FILES}
    assert median(lengths.values()) <= 124
    large = {"engines", "runtime/ray/runtime.py"}
    for path, length in lengths.items():
        assert length <= (400 if path.parts[0] in large or str(path) in large else 300), path


def test_configuration_files_are_short() -> None:
    for path in (PACKAGE.parent / "conf").rglob("*.yaml"):
        assert path.is_relative_to(PACKAGE.parent / "conf" / "recipe") or len(path.read_text().splitlines()) <= 30, path


@pytest.mark.parametrize(("tests", "tested"), [("unit", "rlflow"), ("benchmarks", "benchmarks"), ("docs", "docs")])
def test_tests_mirror_the_modules_that_they_test(tests: str, tested: str) -> None:
    """A file of tests has the name of the module or page, and may add what it is about: test_source_pairs.py."""
    folder = TESTS / tests
    strays = []
    for path in folder.rglob("test_*.py"):
        place = TESTS.parent / tested / path.parent.relative_to(folder)
        names = [
            each.stem.replace("-", "_") for each in place.glob("*") if each.is_dir() or each.suffix in (".py", ".md")
        ]
        if not any(f"{path.stem}_".startswith(f"test_{name}_") for name in names):
            strays.append(str(path.relative_to(folder)))
    assert strays == []


def test_public_names() -> None:
    assert rlflow.__all__ == ["Observer", "compile", "load", "run", "show"]
    assert all(callable(getattr(rlflow, name)) for name in rlflow.__all__)


def test_a_public_class_name_exists_once() -> None:
    places: dict[str, list[Path]] = {}
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path.relative_to(PACKAGE))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


# Functions whose first text names a method that another process runs.
REMOTE_CALLS = {"call", "call_all", "submit", "_call", "_call_all", "_call_shares", "_call_with_folder"}


def test_methods_that_are_called_by_name_exist() -> None:
    """A worker or an engine in another process gets the name of a method as text, which no type checker reads."""
    methods = {
        node.name
        for path in FILES
        if room(path) in ("engines", "nodes", "runtime")
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef)
    }
    num_calls = 0
    for path in FILES:
        if room(path) != "runtime" or path == PACKAGE / "runtime/weights/gpu.py":
            continue  # that file calls vLLM's own methods
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REMOTE_CALLS:
                names = [each.value for each in node.args if isinstance(each, ast.Constant)]
                named = [name for name in names[:2] if isinstance(name, str)]
                assert methods.issuperset(named), (path, node.lineno, named)
                num_calls += len(named)
    assert num_calls > 30, "these calls have other names now"
