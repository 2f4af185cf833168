"""Loads a user's functions by their paths, and makes knobs of their arguments.

1. A path is `path/to/file.py:function`. `load` runs the file once, and returns a
   `UserFunction`; `register` gives a function of a running Python program a path. `run`
   runs a file as `python file.py` would: imports find the files of its folder first.
2. `declare` states what a custom rule needs, such as `bounds='ignored'`.
3. `section` makes a section of the config from the keyword-only arguments of functions.
   These knobs are set and validated like all others.
4. `digest` changes with the text of the file. A run can only be resumed with the same
   digest.
"""

import builtins
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder, SourceFileLoader
from typing import Any, ClassVar, TypeVar

import pydantic

from bapo_jax import knobs as knobs_lib
from bapo_jax.knobs import Section, shown, validate
from bapo_jax.runtime import files

Function = Callable[..., Any]
AnyFunction = TypeVar('AnyFunction', bound=Function)

PATH = re.compile(rf'({knobs_lib.PATH})')
OBJECTS = 'python'  # the "file" of functions that a Python program registers
FOLDER = 'custom_'  # begins the name of a package that stands for a folder
_registered: dict[str, Function] = {}


class CustomKnobs(Section):
  """Base of the sections `custom`, whose knobs are arguments of custom functions.

  Its class variables are what a function may `declare`.
  """

  # The arguments with which the function is called; () skips the check.
  arguments: ClassVar[tuple[str, ...]] = ()
  # Methods of a class in place of a function; () does not look at them.
  methods: ClassVar[tuple[str, ...]] = ()


def declare(**needs: Any) -> Callable[[AnyFunction], AnyFunction]:
  """Returns a decorator that states what a custom function needs.

  >>> @declare(bounds='ignored', needs_proximal=True)
  ... def my_loss(logp_BT, batch, find): ...

  docs/guide/library.md lists what each kind of function may declare.
  """

  def decorate(function: AnyFunction) -> AnyFunction:
    setattr(function, 'declares', needs)  # noqa: B010 (functions have no such field)
    return function

  return decorate


def described(error: BaseException, path: str) -> str:
  """Describes an error of a user's file, with the line of the file that raised it.

  `path` is the path of the file or of a function in it.
  """
  path = os.path.abspath(file_of(path))
  frames = traceback.extract_tb(error.__traceback__)
  lines = [x.lineno for x in frames if os.path.abspath(x.filename) == path]
  where = f' ({os.path.basename(path)}, line {lines[-1]})' if lines else ''
  text = str(error).partition('\n')[0]  # JAX explains itself in further lines
  return f'{type(error).__name__}: {text}{where}'


def is_path(rule: str) -> bool:
  """Returns whether a rule is the path of a function rather than a name."""
  return rule in _registered or PATH.fullmatch(rule) is not None


def paths_in(rules: str) -> list[str]:
  """Returns the paths of functions in a comma-separated list of rules."""
  return [rule for rule in rules.split(',') if is_path(rule)]


def register(function: Function, path: str = '') -> str:
  """Registers a function of this Python program, and returns its path for a config.

  A function of the package has a name as its `path`. Another function of the same path
  replaces it.
  """
  name = getattr(function, '__name__', '')
  if not name.isidentifier():  # a lambda or a functools.partial
    raise ValueError(f'{shown(function)} has no name; define it by `def name(...)`')
  path = path or f'{OBJECTS}:{name}'
  _registered[path] = function
  return path


def is_registered(path: str) -> bool:
  """Returns whether a path names a function that `register` received."""
  return path in _registered or path.startswith(f'{OBJECTS}:')


@dataclasses.dataclass(frozen=True)
class UserFunction:
  """A user's function; equal to another with the same path and version."""

  path: str
  version: str = ''  # digest of the file
  function: Function = dataclasses.field(kw_only=True, compare=False)

  def __call__(self, *arguments: Any, **named: Any) -> Any:
    """Calls the function."""
    return self.function(*arguments, **named)

  def _inner(self) -> tuple[Any, Any]:
    """Unwraps a functools.partial; returns the function, and its `__call__`."""
    function: Any = self.function
    while isinstance(function, functools.partial):
      function = function.func
    return function, function.__call__

  @property
  def declared(self) -> dict[str, Any]:
    """Returns the needs that the function declares."""
    return next((x.declares for x in self._inner() if hasattr(x, 'declares')), {})

  @property
  def is_async(self) -> bool:
    """Whether calls must be awaited."""
    return any(map(inspect.iscoroutinefunction, self._inner()))

  def bound(self, knobs: Section) -> 'UserFunction':
    """Binds the arguments that are knobs."""
    own = [p.name for p in _keywords(inspect.signature(self.function))]
    values = {name: x for name, x in knobs.model_dump().items() if name in own}
    function = functools.partial(self.function, **values)
    return dataclasses.replace(self, function=function)

  def knobs(self, base: type[Section]) -> dict[str, tuple[Any, Any]]:
    """Returns name -> (type, field) of the knobs, for a section with this base.

    Raises:
      ValueError: see `section`.
    """
    arguments = getattr(base, 'arguments')  # noqa: B009 (every base has them)
    is_class = inspect.isclass(self.function)
    methods = getattr(base, 'methods', ()) if is_class else ()
    for name in methods:
      method = getattr(self.function, name, None)
      if not inspect.isfunction(method) or inspect.iscoroutinefunction(method):
        raise ValueError(
          f'{self.path} is a class without a method {name}; define '
          f'{" and ".join(methods)}, without async'
        )
    try:
      signature = inspect.signature(self.function)
      own = _keywords(signature)
      given = arguments or [p for p in signature.parameters.values() if p not in own]
      given = () if methods else given  # an object is made with its knobs alone
      signature.bind(*given, **{p.name: p.default for p in own})
    except (TypeError, ValueError) as error:
      names = ', '.join(arguments)
      raise ValueError(
        f'{self.path} cannot be called with ({names}): {error}; define it as '
        f'{self.path.rpartition(":")[2]}({names}, *, knob=default)'
      ) from None
    for p in own:
      taken = p.name in base.model_fields or hasattr(base, p.name)
      if p.name.startswith('_') or taken:
        raise ValueError(
          f'{self.path}: the argument {p.name} has a reserved name; rename it'
        )
    return {p.name: self._knob(p) for p in own}

  def _knob(self, parameter: inspect.Parameter) -> tuple[Any, Any]:
    """Returns (type, field) of the knob of a keyword-only argument."""
    name = parameter.name
    default = parameter.default
    if default is parameter.empty:
      raise ValueError(
        f'{self.path}: the argument {name} has no default; give it a default'
      )
    kind = self._hint(parameter) or type(default)
    if kind is tuple and default:
      kind = tuple.__class_getitem__((type(default[0]), ...))
    try:
      knobs_lib.kind(kind)
      adapter: Any = pydantic.TypeAdapter
      default = adapter(kind).validate_python(default, strict=True)
    except (KeyError, TypeError, ValueError):
      raise ValueError(
        f'{self.path}: the argument {name}={shown(default)} cannot be a knob; annotate '
        'it as int, float, bool, str, a Literal, or a tuple of one of them, with a '
        'default of this type'
      ) from None
    return kind, knobs_lib.knob(default, f'{name} of {self.path}.', infinite=True)

  def _hint(self, parameter: inspect.Parameter) -> Any:
    """Returns the type of an argument; None if it is imported for checkers only."""
    if parameter.annotation is parameter.empty:
      return None
    holder = types.SimpleNamespace(__annotations__={'hint': parameter.annotation})
    try:
      names = vars(sys.modules[self._inner()[0].__module__])
      return typing.get_type_hints(holder, names)['hint']
    except Exception:  # a name that is imported under TYPE_CHECKING only
      return None

  def needs(self, base: type[Section]) -> dict[str, Any]:
    """Returns what the function declares; raises ValueError if `base` rejects it."""
    inherited = typing.get_type_hints(base.__base__)
    kinds = {
      name: typing.get_args(kind)[0]
      for name, kind in typing.get_type_hints(base).items()
      if typing.get_origin(kind) is ClassVar and name not in inherited
    }
    for name, value in self.declared.items():
      text = f'{self.path} declares {name}={shown(value)}'
      if name not in kinds:
        names = ', '.join(sorted(kinds)) or 'nothing'
        raise ValueError(f'{text}; this part accepts {names}')
      choices = typing.get_args(kinds[name]) or (True, False)
      if value not in choices:
        raise ValueError(f'{text}; give one of {choices}')
    return self.declared


def _keywords(signature: inspect.Signature) -> list[inspect.Parameter]:
  return [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]


def load(path: str) -> UserFunction:
  """Returns the function at a path. Runs its file unless it has run before.

  Raises:
    ValueError: the file or the function does not exist, or the file raises an error.
  """
  name = path.rpartition(':')[2]
  version = digest(path)
  if is_registered(path):
    return UserFunction(path, version, function=_registered_at(path))
  file = file_of(path)
  try:
    module = _run_once(os.path.abspath(file), version)
  except (Exception, SystemExit) as error:  # a user's file may raise anything
    raise ValueError(f'{file} raises {described(error, file)}') from error
  function = getattr(module, name, None)
  if not callable(function):
    has = [n for n, x in vars(module).items() if inspect.isfunction(x)]
    names = ', '.join(has) or 'none'
    raise ValueError(f'{path} names no function of the file; its functions: {names}')
  return UserFunction(path, version, function=function)


def _registered_at(path: str) -> Function:
  if path not in _registered:
    raise ValueError(
      f'{path}: this function was an object of a Python program; start the run again '
      'by bapo_jax.train from that program'
    )
  return _registered[path]


def run(path: str, version: str = '') -> types.ModuleType:
  """Runs a file and returns its module; raises what the file raises.

  The folder of the file becomes a package with a name of its own, whose submodules are
  the file and its neighbours. So two folders may both have a helper.py. `version` is
  part of the module's name; functions of another version keep their module.
  """
  path = os.path.abspath(path)
  # Python looks in the folder of the real file; a link may have neighbours as well.
  folders = [os.path.dirname(os.path.realpath(path)), os.path.dirname(path)]
  package = FOLDER + hashlib.sha256(repr(folders).encode()).hexdigest()[:12]
  if package not in sys.modules:
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = folders
    sys.path.extend(folders)  # for importlib.import_module
  name = f'{package}.{os.path.basename(path)[:-3]}{version}'
  loader = _Neighbours(name, path)
  spec = importlib.util.spec_from_file_location(name, path, loader=loader)
  assert spec
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # dataclasses and pickle look their module up
  loader.exec_module(module)
  return module


_run_once = functools.cache(run)


class _Neighbours(SourceFileLoader):
  """Loads a user's file with an `import` that finds the files of its folder first.

  Other modules import as always. A function may import when it is called, in any
  thread, because the `import` belongs to the file.
  """

  @classmethod
  def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
    """Finds the neighbours of a file, as submodules of the package of its folder."""
    del target
    spec = PathFinder.find_spec(name, path) if name.startswith(FOLDER) else None
    if spec and isinstance(spec.loader, SourceFileLoader):
      spec.loader = cls(name, spec.loader.path)
    return spec

  def exec_module(self, module: types.ModuleType) -> None:
    """Runs the file, whose built-in `__import__` is its own."""
    package = module.__name__.partition('.')[0]

    def find(name, globals=None, locals=None, fromlist=(), level=0):
      first = f'{package}.{name.partition(".")[0]}'
      spec = None if level else importlib.util.find_spec(first)
      # A folder without __init__.py is no neighbour: anything installed comes first.
      if not spec or not spec.origin or first.endswith('.bapo_jax'):
        return __import__(name, globals, locals, fromlist, level)
      found = __import__(f'{package}.{name}', globals, locals, fromlist)
      return found if fromlist else sys.modules[first]

    vars(module)['__builtins__'] = vars(builtins) | {'__import__': find}
    super().exec_module(module)


sys.meta_path.insert(0, _Neighbours)


def file_of(path: str) -> str:
  """Returns the file of a function's path; the path itself if it is registered."""
  return path if is_registered(path) else files.local(re.sub(r':\w+$', '', path))


def digest(path: str) -> str:
  """Returns a digest of the file at a path, 12 hexadecimal digits long.

  For a registered function it is the digest of the function's source. Files that the
  file imports are not included.

  Raises:
    ValueError: the file cannot be read.
  """
  file = file_of(path)
  if is_registered(path):
    function = _registered_at(path)
    try:
      text = inspect.getsource(function).encode()
    except (OSError, TypeError):  # typed into an interpreter, or a callable object
      text = getattr(getattr(function, '__code__', None), 'co_code', b'')
  else:
    try:
      with open(file, 'rb') as stream:
        text = stream.read()
    except OSError as error:
      raise ValueError(
        f'{file} cannot be read ({error.strerror}); give path/to/file.py:function, '
        'relative to the current directory'
      ) from error
  return hashlib.sha256(text).hexdigest()[:12]


def section(
  paths: Sequence[str], base: type[Section], rule: type[Section] | None = None
) -> type[Any]:
  """Returns a subclass of `base` whose knobs are arguments of custom functions.

  Every keyword-only argument becomes a knob, whose type is the argument's annotation or
  else the type of its default. Arguments of the same name share one knob. Declarations
  become class variables. With `rule`, which is `parts.Custom`, the section is callable.

  Raises:
    ValueError: a function cannot be loaded or called with base.arguments, an argument
      has no usable type or default, or a declaration is not one that `base` accepts.
  """
  return _section(base, tuple(map(load, paths)), rule) if paths else base


@functools.cache  # one class for equal knobs, so that two equal configs compare equal
def _section(
  base: type[Section], functions: tuple[UserFunction, ...], rule: type[Section] | None
) -> type[Any]:
  knobs: dict[str, tuple[Any, Any]] = {}
  needs: dict[str, Any] = {}
  for function in functions:
    for name, new in function.knobs(base).items():
      kind, field = knobs.setdefault(name, new)
      if (kind, field.default) != (new[0], new[1].default):
        raise ValueError(
          f'{function.path}: the argument {name}={shown(new[1].default)} has another '
          'type or default in another function; rename one of the two arguments'
        )
    needs |= function.needs(base)
  bases: Any = base
  if rule is not None:
    bases = rule, base
    knobs['rule'] = str, functions[0].path
    needs['function'] = functions[0]
  kind: Any = ClassVar
  constants = {name: (kind[Any], value) for name, value in needs.items()}
  fields: Any = knobs | constants
  return pydantic.create_model('Custom', __base__=bases, **fields)


class CustomSection(Section):
  """A section whose knobs may name custom functions; `custom` has their knobs."""

  # The fields that may be paths of functions; `custom` follows them.
  path_fields: ClassVar[tuple[str, ...]] = ('rule',)

  @classmethod
  def custom_type(cls, values: Mapping[str, Any]) -> type[CustomKnobs]:
    """Returns the section of the custom functions that these values name.

    Raises:
      ValueError: a function cannot be used.
    """
    base = cls.model_fields['custom'].annotation
    assert isinstance(base, type) and issubclass(base, CustomKnobs)
    named = {name: paths_in(str(values.get(name, ''))) for name in cls.path_fields}
    paths = list(dict.fromkeys(path for paths in named.values() for path in paths))
    try:
      return section(paths, base)
    except ValueError as error:
      name = next(name for name in named if named[name])
      raise ValueError(f'{name}={error}') from None

  # Errors are relative to the section: 'rule=my.py:f: ...' or 'custom.tau=...'.
  @pydantic.field_validator('custom', mode='before', check_fields=False)
  @classmethod
  def _custom(cls, values: Any, info: pydantic.ValidationInfo) -> Any:
    if isinstance(values, CustomKnobs):
      values = values.model_dump()
    return validate(cls.custom_type(info.data), values, 'custom')


def custom_knobs(base: type[CustomKnobs]) -> Any:
  """Makes the field `custom` of a section; it follows the fields that may be paths."""
  sentence = 'Knobs of custom functions: their keyword arguments.'
  return pydantic.Field(
    default_factory=base, validate_default=True, description=sentence
  )
