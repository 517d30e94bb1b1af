"""Where a session's own kernels and masks come from: files and modules, by name, so that a worker can load them again."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytest_longca.catalogue import Catalogue
from pytest_longca.errors import InvalidArgument, asked

if TYPE_CHECKING:
    from pytest_longca.parallel.mechanisms import Mechanism

HOOKS = ("pytest_longca_kernels", "pytest_longca_masks")


@dataclass(frozen=True, slots=True)
class Source:
    """A file or an importable module that implements one of our hooks."""

    name: str
    path: str | None

    def to_json(self) -> list[str | None]:
        return [self.name, self.path]


def sources_of(pluginmanager: Any) -> tuple[Source, ...]:
    """The sources of all plugins that implement our hooks. Raises InvalidArgument for a plugin that has no file."""
    plugins: dict[int, Any] = {}
    for hook in HOOKS:
        for implementation in getattr(pluginmanager.hook, hook).get_hookimpls():
            plugins[id(implementation.plugin)] = implementation.plugin
    return tuple(_source_of(plugin) for plugin in plugins.values())


def _source_of(plugin: Any) -> Source:
    if not isinstance(plugin, ModuleType) or not plugin.__file__:
        raise InvalidArgument(
            f"{plugin!r} adds kernels or masks, but workers cannot import it: "
            "put the hook into a conftest.py or a module, or use --longca-isolate=off"
        )
    return Source(plugin.__name__, plugin.__file__)


def load_catalogue(sources: Iterable[Source]) -> Catalogue:
    """Import the sources and ask their hooks. Raises InvalidArgument, naming the source, for whatever they do wrong."""
    modules = [(_import(source), source.path or source.name) for source in sources]
    return _catalogue((hook, module, path) for module, path in modules for hook in HOOKS)


def catalogue_of(pluginmanager: Any) -> Catalogue:
    """The catalogue of plugins that are loaded in this process."""
    return _catalogue(
        (hook, implementation.plugin, _path_of(implementation.plugin))
        for hook in HOOKS
        for implementation in getattr(pluginmanager.hook, hook).get_hookimpls()
    )


def _path_of(plugin: Any) -> str:
    return getattr(plugin, "__file__", None) or repr(plugin)


def mechanisms_of(pluginmanager: Any) -> "dict[str, Mechanism]":
    """Mechanisms of context parallelism by name: the built-in ones and those of loaded plugins. Raises InvalidArgument for a wrong one."""
    from pytest_longca.parallel.mechanisms import MECHANISMS, Mechanism

    found = dict(MECHANISMS)
    for implementation in pluginmanager.hook.pytest_longca_mechanisms.get_hookimpls():
        for row in _ask("pytest_longca_mechanisms", implementation.plugin, _path_of(implementation.plugin)):
            if not isinstance(row, Mechanism):
                raise InvalidArgument(f"pytest_longca_mechanisms returned {row!r}: return pytest_longca.parallel.mechanisms.Mechanism")
            if row.name in found:
                raise InvalidArgument(f"two mechanisms are named {row.name!r}: rename one of them")
            found[row.name] = row
    return found


def _catalogue(implementations: Iterable[tuple[str, Any, str]]) -> Catalogue:
    """What the implementations (hook, plugin, its path) add. Raises InvalidArgument for what is no kernel or no mask class at all.

    A mask's predicate is tried when the mask is used: one that is wrong must not stop a run of others.
    """
    kernels: list[Any] = []
    masks: list[tuple[Any, str]] = []
    for hook, plugin, path in implementations:
        for value in _ask(hook, plugin, path):
            if hook == "pytest_longca_kernels":
                kernels.append(_checked_kernel(value, f"{hook} in {path}"))
            else:
                masks.append((_checked_mask(value, f"{hook} in {path}"), f"{hook} in {path}"))
    return Catalogue(kernels, masks)


def _checked_kernel(kernel: Any, place: str) -> Any:
    from pytest_longca.kernel import Capabilities, Kernel

    if not isinstance(kernel, Kernel):
        raise InvalidArgument(f"{place} returned {kernel!r}: return instances of pytest_longca.kernel.Kernel, such as [MyKernel()]")
    if not isinstance(kernel.capabilities, Capabilities):
        what = f"{place}: kernel {kernel.name!r} has capabilities {kernel.capabilities!r}"
        raise InvalidArgument(f"{what}: give it an instance of pytest_longca.kernel.Capabilities")
    return kernel


def _checked_mask(mask: Any, place: str) -> Any:
    from pytest_longca.mask import Mask

    if not (isinstance(mask, type) and issubclass(mask, Mask)):
        raise InvalidArgument(f"{place} returned {mask!r}: return subclasses of pytest_longca.mask.Mask (the class, not an instance)")
    return mask


def _ask(hook: str, plugin: Any, path: str) -> list[Any]:
    function = getattr(plugin, hook, None)
    if function is None:
        return []
    found = asked(f"{hook} in {path}", function)
    if not isinstance(found, Iterable):
        raise InvalidArgument(f"{hook} in {path} returned {found!r}: return a list, of one as of many")
    return asked(f"{hook} in {path}", lambda: list(found))


def _import(source: Source) -> ModuleType:
    if source.name in sys.modules and getattr(sys.modules[source.name], "__file__", None) == source.path:
        return sys.modules[source.name]
    if source.path is None:
        return importlib.import_module(source.name)
    spec = importlib.util.spec_from_file_location(source.name, source.path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"{source.path} cannot be imported: it is no Python file")
    module = importlib.util.module_from_spec(spec)
    if str(Path(source.path).parent) not in sys.path:
        sys.path.insert(0, str(Path(source.path).parent))
    sys.modules[source.name] = module
    spec.loader.exec_module(module)
    return module
