"""Model directories with one damage each, and the doors that a run enters them by.

`python tests/broken_models.py ROOT` makes a small valid directory, then each damaged
copy below ROOT, and prints a JSON line per case: what loading it came to.
"""

import json
import os
import pathlib
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
CHAT = 'chat:{problem}'


class Case(NamedTuple):
  """A damage."""

  name: str
  damage: Callable[[pathlib.Path], object]
  loads: bool = False  # it is valid after all
  template: str = '{problem}\n'


def edited(file: str, **changes: Any) -> Callable[[pathlib.Path], object]:
  """Sets entries of a JSON file; Ellipsis removes one."""

  def damage(path):
    held = json.loads((path / file).read_text()) if (path / file).exists() else {}
    held = {k: v for k, v in (held | changes).items() if v is not ...}
    (path / file).write_text(json.dumps(held))

  return damage


def written(file: str, content: str | bytes) -> Callable[[pathlib.Path], object]:
  """Replaces a file."""
  content = content.encode() if isinstance(content, str) else content
  return lambda path: (path / file).write_bytes(content)


def instead(file: str, make: Callable[[pathlib.Path], object]):
  """Puts something that is no file in its place."""

  def damage(path):
    (path / file).unlink(missing_ok=True)
    make(path / file)

  return damage


def changed(file: str, change: Callable[[Any], object]):
  """Changes the object in a JSON file in place."""

  def damage(path):
    held = json.loads((path / file).read_text())
    change(held)
    (path / file).write_text(json.dumps(held))

  return damage


WEIGHTS, INDEX = 'model.safetensors', 'model.safetensors.index.json'
DEEP = '{"a":' * 100_000 + '1' + '}' * 100_000
NOT_JSON = {
  'empty': '',
  'a list': '[1, 2]',
  'null': 'null',
  'no JSON': '{"a": ',
  'binary': b'\xff\xfe\x00\x80' * 20,
  'nested': DEEP,
  'a number of many digits': '{"a": ' + '9' * 10_000 + '}',
}


def header(change: Callable[[dict], object]):
  """Changes the header of the weights in place; the data stay."""

  def damage(path):
    raw = (path / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], 'little')
    held = json.loads(raw[8 : 8 + length])
    text = json.dumps(change(held) or held).encode()
    (path / WEIGHTS).write_bytes(
      len(text).to_bytes(8, 'little') + text + raw[8 + length :]
    )

  return damage


def entry(name: str = 'model.norm.weight', **changes: Any):
  """Changes the header's entry of one tensor; Ellipsis removes a field."""

  def change(held):
    held[name] = {k: v for k, v in (held[name] | changes).items() if v is not ...}

  return header(change)


def bits(value: float, dtype: str, tensor: str = 'model.layers.1.mlp.up_proj.weight'):
  """Writes the weights in a dtype, one number of one tensor replaced."""

  def damage(path):
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import load_file, save_file

    kind = ml_dtypes.bfloat16 if dtype == 'bfloat16' else np.dtype(dtype)
    tensors = load_file(path / WEIGHTS)
    tensors = {name: x.astype(kind) for name, x in tensors.items()}
    tensors[tensor].ravel()[-1] = value
    save_file(tensors, path / WEIGHTS)

  return damage


def cut(size: int):
  """Cuts the weights to a size, or makes them longer with a hole."""
  return lambda path: os.truncate(path / WEIGHTS, size)


def giant(length: int, size: int):
  """Weights whose header claims `length` bytes, in a sparse file of `size`."""

  def damage(path):
    (path / WEIGHTS).write_bytes(length.to_bytes(8, 'little'))
    os.truncate(path / WEIGHTS, size)

  return damage


def sharded(change: Callable[[dict], object] = lambda index: None, twice: bool = False):
  """Splits the weights into two files with an index, then changes the index."""

  def damage(path):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path / WEIGHTS)
    names = sorted(tensors)
    parts = {'a.safetensors': names[::2], 'b.safetensors': names[1::2] + names[:twice]}
    for file, held in parts.items():
      save_file({n: tensors[n] for n in held}, path / file)
    (path / WEIGHTS).unlink()
    index = {
      'metadata': {'total_size': 1},
      'weight_map': {n: file for file, held in parts.items() for n in held},
    }
    (path / INDEX).write_text(json.dumps(change(index) or index))

  return damage


def _swap(held):
  a, b = held['model.norm.weight'], held['model.embed_tokens.weight']
  a['data_offsets'], b['data_offsets'] = b['data_offsets'], a['data_offsets']


def _repeated(path):
  raw = (path / WEIGHTS).read_bytes()
  length = int.from_bytes(raw[:8], 'little')
  text = raw[8 : 8 + length].rstrip()
  first = json.loads(text)['model.norm.weight']
  text = text[:-1] + b', "model.norm.weight": ' + json.dumps(first).encode() + b'}'
  (path / WEIGHTS).write_bytes(
    len(text).to_bytes(8, 'little') + text + raw[8 + length :]
  )


def configs() -> Iterator[Case]:
  """Damages to config.json."""
  file = 'config.json'
  for name, content in NOT_JSON.items():
    yield Case(f'config: {name}', written(file, content))
  yield Case('config: a directory', instead(file, pathlib.Path.mkdir))
  yield Case('config: a pipe', instead(file, os.mkfifo))
  yield Case('config: a loop', instead(file, lambda p: p.symlink_to(p)))
  yield Case('config: 50 MB', written(file, '{"a": "' + 'x' * (50 << 20) + '"}'))
  yield Case(
    'config: a name twice',
    lambda p: (p / file).write_text(
      (p / file).read_text().rstrip()[:-1] + ', "hidden_size": 16}'
    ),
  )
  for name in (
    'vocab_size',
    'hidden_size',
    'num_hidden_layers',
    'num_attention_heads',
    'intermediate_size',
    'max_position_embeddings',
  ):
    for value in ('16', -1, 0, 2.5, True, [16], 10**9 * 10**9, ...):
      yield Case(f'config: {name}={value!r}', edited(file, **{name: value}))
  for name in ('num_key_value_heads', 'head_dim'):
    for value in ('16', -2, 2.5, {}, 10**30):
      yield Case(f'config: {name}={value!r}', edited(file, **{name: value}))
  yield Case('config: a billion layers', edited(file, num_hidden_layers=10**9))
  yield Case('config: an odd head', edited(file, head_dim=15))
  yield Case('config: 3 of 2 heads', edited(file, num_key_value_heads=3))
  for name in ('tie_word_embeddings', 'attention_bias', 'use_sliding_window'):
    for value in ('false', 1):
      yield Case(f'config: {name}={value!r}', edited(file, **{name: value}))
  yield Case('config: mlp_bias', edited(file, mlp_bias='false'))
  for value in ('1e-5', -1, float('nan'), float('inf'), [], True):
    yield Case(f'config: rms_norm_eps={value!r}', edited(file, rms_norm_eps=value))
  for value in ('1e4', -1, 0, 1, float('nan'), float('inf'), {}):
    rope = {'rope_type': 'default', 'rope_theta': value}
    yield Case(f'config: theta={value!r}', edited(file, rope_parameters=rope))
  for value in ([1], 'llama3', 5, True):
    yield Case(f'config: rope={value!r}', edited(file, rope_parameters=value))
  for value in ('4', 0, -4, float('nan'), [4], None, True):
    rope = {'rope_type': 'linear', 'factor': value}
    yield Case(f'config: factor={value!r}', edited(file, rope_parameters=rope))
  for value in (5, ['llama3'], None):
    rope = {'rope_type': value, 'factor': 2.0}
    yield Case(f'config: rope_type={value!r}', edited(file, rope_parameters=rope))
  for name, values in {
    'model_type': (..., 5, ['llama'], None, 'LLAMA'),
    'architectures': ('LlamaForCausalLM', 5, [5], {'a': 1}),
    'dtype': (5, ['float32'], 'int8'),
    'layer_types': (5, 'sliding_attention', [5], [[]]),
    'sliding_window': ('x', -1, [5]),
    'max_window_layers': ('x', [1]),
    'hidden_act': (5, ['silu']),
    'quantization_config': ('int8', {'bits': 4}),
  }.items():
    for value in values:
      yield Case(f'config: {name}={value!r}', edited(file, **{name: value}))
  yield Case('config: unknown options', edited(file, new_option=[1]), loads=True)
  yield Case('config: a null window', edited(file, sliding_window=None), loads=True)


def weights() -> Iterator[Case]:
  """Damages to the safetensors files and their index."""
  yield Case('weights: empty', written(WEIGHTS, b''))
  for size in (4, 8, 100, 9000):
    yield Case(f'weights: cut to {size}', cut(size))
  yield Case('weights: longer', cut(1 << 20))
  yield Case('weights: a header of 8 GB', giant(8 * 10**9, 9 * 10**9))
  yield Case('weights: a header of 90 MB', giant(90 * 10**6, 10**8))
  yield Case('weights: a header of 2^63', giant(2**63, 10**6))
  for name, content in NOT_JSON.items():
    text = content.encode() if isinstance(content, str) else content
    raw = len(text).to_bytes(8, 'little') + text + b'\0' * 64
    yield Case(f'weights: header: {name}', written(WEIGHTS, raw))
  yield Case('weights: a directory', instead(WEIGHTS, pathlib.Path.mkdir))
  yield Case('weights: a pipe', instead(WEIGHTS, os.mkfifo))
  gone = instead(WEIGHTS, lambda p: p.symlink_to('nowhere'))
  yield Case('weights: a dangling link', gone)
  yield Case('weights: no tensors', header(lambda held: {'__metadata__': {}}))
  yield Case('weights: an entry is a list', header(lambda h: h | {'x': [1]}))
  yield Case('weights: an entry is null', header(lambda h: h | {'x': None}))
  yield Case('weights: an empty entry', header(lambda h: h | {'x': {}}))
  yield Case('weights: offsets of another', header(_swap))
  yield Case('weights: a tensor twice', _repeated)
  for field, values in {
    'dtype': (..., 5, ['F32'], 'I8', 'F8_E4M3', 'f32'),
    'shape': (..., 16, '16', [-16], [16.0], [True] * 16, [[16]], [2**62, 2**62], []),
    'data_offsets': (
      ...,
      5,
      'x',
      [0],
      [0, 32, 64],
      [-32, 0],
      [32, 0],
      ['0', '32'],
      [0.0, 32.0],
      [0, 32],
      [10**12, 10**12 + 32],
      [2**70, 2**70 + 32],
    ),
  }.items():
    for value in values:
      yield Case(f'weights: {field}={value!r}', entry(**{field: value}))
  for value in ('nan', 'inf', '-inf'):
    for dtype in ('float32', 'bfloat16', 'float16'):
      yield Case(f'weights: {value} in {dtype}', bits(float(value), dtype))
  yield Case(
    'weights: nan in the head', bits(float('nan'), 'float32', 'lm_head.weight')
  )
  yield Case('weights: large and finite', bits(6e4, 'float16'), loads=True)
  yield Case('index: two files', sharded(), loads=True)
  yield Case('index: a tensor in two files', sharded(twice=True))
  for name, content in NOT_JSON.items():
    yield Case(f'index: {name}', written(INDEX, content))
  yield Case('index: no map', sharded(lambda index: {'metadata': {}}))
  yield Case('index: empty map', sharded(lambda index: {'weight_map': {}}))
  for value in ([], 'a.safetensors', 5, {'x': 5}, {'x': ['a.safetensors']}):
    yield Case(f'index: map={value!r}', sharded(lambda i, v=value: {'weight_map': v}))
  for value in ('c.safetensors', '../x.safetensors', '/etc/passwd', '', '\0'):
    yield Case(
      f'index: file={value!r}',
      sharded(
        lambda i, v=value: {'weight_map': i['weight_map'] | {'lm_head.weight': v}}
      ),
    )
  yield Case(
    'index: one file short',
    sharded(lambda i: {'weight_map': dict.fromkeys(i['weight_map'], 'a.safetensors')}),
  )


def _set(*keys: str | int, value: Any) -> Callable[[Any], object]:
  """Sets an element of nested lists and dicts."""

  def change(held):
    for key in keys[:-1]:
      held = held[key]
    held[keys[-1]] = value

  return change


def tokenizers() -> Iterator[Case]:
  """Damages to the tokenizer's files and generation_config.json."""
  file, options = 'tokenizer.json', 'tokenizer_config.json'
  for name, content in NOT_JSON.items():
    yield Case(f'tokenizer: {name}', written(file, content))
    yield Case(f'tokenizer options: {name}', written(options, content))
    yield Case(f'generation: {name}', written('generation_config.json', content))
  yield Case('tokenizer: an empty object', written(file, '{}'))
  yield Case('tokenizer: a directory', instead(file, pathlib.Path.mkdir))
  split = {'type': 'Split', 'behavior': 'Isolated', 'invert': False}
  for keys, value in (
    (('model',), None),
    (('model',), {'type': 'Unknown'}),
    (('model', 'vocab'), ['a', 'b']),
    (('model', 'vocab'), {'a': 'b'}),
    (('model', 'vocab'), {'a': -1}),
    (('model', 'vocab'), {}),
    (('model', 'vocab', '1'), 40),
    (('model', 'vocab', '1'), 2**31),
    (('model', 'vocab', '1'), 2**40),
    (('model', 'merges'), ['x y']),
    (('model', 'merges'), 5),
    (('added_tokens',), 5),
    (('added_tokens', 0, 'id'), 10**9),
    (('added_tokens', 0, 'id'), 'x'),
    (('pre_tokenizer',), {'type': 'None'}),
    (('pre_tokenizer',), split | {'pattern': {'Regex': '(('}}),
    (('pre_tokenizer',), 5),
    (('decoder',), {'type': 5}),
    (('normalizer',), 'NFC'),
  ):
    damage = changed(file, _set(*keys, value=value))
    # The library looks up the id of an added token by its text.
    loads = keys[0] == 'added_tokens' and value == 10**9
    yield Case(f'tokenizer: {keys}={value!r:.40}', damage, loads)
  for name, value in (
    ('eos_token', 5),
    ('eos_token', ['<eos>']),
    ('eos_token', {'content': 5}),
    ('eos_token', None),
    ('eos_token', '<new end>'),
    ('unk_token', 5),
    ('added_tokens_decoder', 5),
    ('added_tokens_decoder', {'x': {'content': 'y'}}),
    ('added_tokens_decoder', {'1': 'x'}),
    ('added_tokens_decoder', {'1': {'content': 5}}),
    ('extra_special_tokens', 5),
    ('tokenizer_class', 5),
    ('padding_side', 'top'),
  ):
    # generation_config.json names ends as well; a new token fits into the vocabulary.
    loads = name == 'tokenizer_class' or value in (None, '<new end>')
    damage = edited(options, **{name: value})
    yield Case(f'tokenizer options: {name}={value!r}', damage, loads)
  yield Case('special tokens: a list', written('special_tokens_map.json', '[1]'))
  yield Case('added tokens: a list', written('added_tokens.json', '[1]'))
  for value in ('1', -1, 40, 10**12, True, 1.0, [1, '4'], [[1]], {'a': 1}):
    yield Case(
      f'generation: eos={value!r}', edited('generation_config.json', eos_token_id=value)
    )
  none = edited('generation_config.json', eos_token_id=[])
  yield Case("generation: the tokenizer's end alone", none, loads=True)
  yield Case(
    'generation: other options are wrong',
    edited('generation_config.json', temperature='hot', top_k=[]),
    loads=True,
  )


def templates() -> Iterator[Case]:
  """Chat templates that fail."""
  for name, text in {
    'recurses': '{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}',
    'is no template': '{% for',
    'has an unknown filter': "{{ 'a'|nosuch }}",
    'raises': "{{ raise_exception('no users here') }}",
    'needs a tool': '{{ tools[0].name.first }}',
    'reaches out': "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    'divides by zero': '{{ 1 / 0 }}',
  }.items():
    damage = written('chat_template.jinja', text)
    yield Case(f'template: {name}', damage, template=CHAT)
  for value in (5, ['x'], [{'name': 'default'}], {'a': 1}):

    def damage(path, value=value):
      (path / 'chat_template.jinja').unlink()
      edited('tokenizer_config.json', chat_template=value)(path)

    yield Case(f'template: options: {value!r:.40}', damage, template=CHAT)
  damage = written('chat_template.jinja', b'\xff\xfe\x80')
  yield Case('template: binary', damage, template=CHAT)
  damage = written('chat_template.jinja', "{{ messages[-1]['content'] + '\\n' }}")
  yield Case('template: valid', damage, loads=True, template=CHAT)


def cases() -> list[Case]:
  """All of them."""
  return [*configs(), *weights(), *tokenizers(), *templates()]


def enter(path: str, workdir: str, template: str) -> None:
  """Loads a model as a run does: what is there, tokenizer and problems, weights."""
  import runs

  from bapo_jax.runtime.progress import PhaseTimer
  from bapo_jax.training import build, policy, resolve

  config = runs.tiny(**{'model.path': path, 'tokenizer.template': template})
  resolve.check_available(config)
  mesh = resolve.make_mesh(config)
  tokenizer = build.read(config, resolve.open_model(config), workdir).tokenizer
  policy.load(config, workdir, tokenizer, mesh, PhaseTimer())


def _usages() -> list[resource.struct_rusage]:
  """Of this process and of those that it has waited for."""
  return [
    resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  ]


def _seconds() -> float:
  """Processor time, which other processes of the machine do not lengthen."""
  return sum(usage.ru_utime + usage.ru_stime for usage in _usages())


def main(root: pathlib.Path, only: str = '') -> None:
  """Prints a line per case: outcome, processor time, peak of memory."""
  import runs

  from bapo_jax.runtime import machine

  valid = runs.source(root / 'valid')
  chosen = [c for c in cases() if c.name.startswith(only)]
  for i, case in enumerate([Case('valid', lambda path: None, loads=True), *chosen]):
    path = root / f'{i}'
    shutil.copytree(valid, path)
    case.damage(path)
    began, kind, message = _seconds(), 'loads', ''
    try:
      enter(str(path), str(root / f'work{i}'), case.template)
    except BaseException as error:
      kind, message = type(error).__name__, str(error)
    line = {
      'name': case.name,
      'wanted': 'loads' if case.loads else 'ValueError',
      'kind': kind,
      'message': message,
      'cpu_seconds': _seconds() - began,
      'peak': machine.peak_rss(),
    }
    print('CASE', json.dumps(line), flush=True)
    shutil.rmtree(path)


if __name__ == '__main__':
  sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
  main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
