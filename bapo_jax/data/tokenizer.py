r"""Tokenizers and prompt templates: the only importer of transformers.

1. `load` opens the tokenizer in a directory; 'characters' makes the embedded one;
2. `tokenize_prompts` turns problems into token rows through the template, in two
   halves: `encode_prompts`, `pad`;
3. `decode_responses` turns rows into text.
"""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32
from numpy.typing import ArrayLike

from bapo_jax.data import chat_templates
from bapo_jax.data.knobs import EMBEDDED
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.runtime import json_files

# Only tokenizers are used: that torch is missing is nothing to be warned about.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

# The alphabet of the embedded problems. `\boxed{` is one token: an answer costs three,
# not nine. `<image>` stands for a merged patch of a picture.
BOX, IMAGE = r'\boxed{', '<image>'
CHARACTERS = ('<pad>', '<eos>', BOX, *'}\n 0123456789+-*=|modx/()', IMAGE)


class Tokenizer(NamedTuple):
  """A tokenizer, the end tokens of responses, and the template of prompts."""

  backend: Any  # transformers.PreTrainedTokenizerFast
  eos: tuple[int, ...]  # every token that ends a response
  template: str  # the prompt, {problem} in it; chat: before it, a chat's user message


def characters() -> Any:
  """The embedded tokenizer, one token per character, as transformers would load it.

  A byte-level BPE without merges: of tokenizer.json, Qwen2's own class in transformers
  uses vocabulary, merges and added tokens, and brings its own splitting and decoding.
  """
  import tokenizers
  import transformers

  # Bytes as GPT-2 spells them: those that do not print have symbols from U+0100 on.
  symbols = [token.replace('\n', 'Ċ').replace(' ', 'Ġ') for token in CHARACTERS]
  vocab = {symbol: i for i, symbol in enumerate(symbols)}
  model = tokenizers.models.BPE(vocab, merges=[], unk_token='<pad>')
  backend = tokenizers.Tokenizer(model)
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  # An added token, since Qwen2's splitting lets no merge cross from \boxed to {. It is
  # not a special one: decoding without special tokens must not drop it.
  backend.add_tokens(
    [tokenizers.AddedToken(each, normalized=False) for each in (BOX, IMAGE)]
  )
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    unk_token='<pad>',  # `encode` refuses it
    pad_token='<pad>',
    eos_token='<eos>',
    clean_up_tokenization_spaces=False,
    chat_template="{{ messages[-1]['content'] + '\\n' }}",  # Jinja drops a last newline
  )


def load(path: str, template: str) -> Tokenizer:
  """The tokenizer in a directory, or the embedded one: 'characters'.

  Raises:
    ValueError: it cannot be loaded, names no end token, or lacks a chat template.
  """
  if path == EMBEDDED:
    made = characters()
    return Tokenizer(made, (made.eos_token_id,), template)
  # transformers would ask the hub for the name: 47 s where there is no network.
  if not os.path.isdir(path):
    raise ValueError(
      f'tokenizer.path: no directory {path!r}{hf_directory.hint(path)}; give one that '
      "holds tokenizer.json, or 'characters'"
    )
  _check_files(path)
  loaded = _opened(path)
  if template.startswith('chat:') and not loaded.chat_template:
    raise ValueError(
      f'tokenizer.template: {template[:30]!r} needs a chat template, and {path!r} '
      'has none; write the whole prompt out, without chat:'
    )
  return Tokenizer(loaded, _end_tokens(path, loaded), template)


LONGEST = 64 * 10**6  # bytes of tokenizer.json; the largest published ones have 33 MB


def _check_files(path: str) -> None:
  """Raises ValueError where a file of the directory is damaged or far too large."""
  for name in os.listdir(path):
    if name in FILES and name.endswith('.json'):
      most = LONGEST if name in ('tokenizer.json', 'vocab.json') else 10**7
      # tokenizer.json is left to the library, which is ten times as fast.
      file = os.path.join(path, name)
      content = json_files.read_bytes(file, most)
      if most < LONGEST:
        json_files.parse(content, file)


def _opened(path: str) -> Any:
  """The tokenizer of a directory; raises ValueError."""
  import transformers

  try:
    # tokenizer.json to the letter. AutoTokenizer goes by config.json: beside that of a
    # Qwen2 it replaces this file's splitting by Qwen's own.
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    # Its parts are used here for the first time.
    loaded('1 + 1', add_special_tokens=False)
    template = loaded.chat_template
    if template and not isinstance(loaded.get_chat_template(), str):
      raise ValueError(f'its chat template is {template!r:.40}, not a text')
    json.dumps([loaded.special_tokens_map, loaded.eos_token_id, loaded.get_vocab()])
  except (KeyboardInterrupt, SystemExit):
    raise
  except BaseException as error:  # the library checks no types, and its core may panic
    reason = (' '.join(str(error).split()) or type(error).__name__)[:200]
    raise ValueError(
      f'tokenizer.path: cannot load {path!r}; give a directory that holds '
      f'tokenizer.json ({reason.rstrip(".: ")})'
    ) from None
  return loaded


# The files of tokenizers of all versions and families.
FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'tokenizer.model',
  'chat_template.jinja',
  'chat_template.json',
)


def save(tokenizer: Tokenizer, source: str, path: str) -> None:
  """Writes the tokenizer into the directory `path`: the files of `source`, if any."""
  if not os.path.isdir(source):
    tokenizer.backend.save_pretrained(path)
    return
  for name in FILES:
    if os.path.exists(os.path.join(source, name)):
      shutil.copyfile(os.path.join(source, name), os.path.join(path, name))


def _end_tokens(path: str, backend: Any) -> tuple[int, ...]:
  """End tokens: the tokenizer's own and all that generation_config.json lists."""
  ends = [] if backend.eos_token_id is None else [backend.eos_token_id]
  file = os.path.join(path, 'generation_config.json')
  if os.path.exists(file):
    listed = json_files.read(file).get('eos_token_id')
    listed = listed if isinstance(listed, list) else [listed]
    if wrong := [i for i in listed if i is not None and (type(i) is not int or i < 0)]:
      raise ValueError(
        f'{file}: eos_token_id={wrong[0]!r:.40} is no token id; give an integer from 0 '
        'on, or a list of them'
      )
    ends += listed
  ends = tuple(dict.fromkeys(i for i in ends if i is not None))
  if not ends:
    raise ValueError(
      f'tokenizer.path: {path!r} names no end token; add eos_token_id to its '
      'generation_config.json'
    )
  return ends


def tokenize_prompts(
  tokenizer: Tokenizer, problems: Sequence[str], width: int
) -> tuple[Int32[np.ndarray, 'N T'], Int32[np.ndarray, ' N']]:
  """(tokens_NT padded to `width` on the right, length_N).

  Raises:
    ValueError: a prompt has more than `width` tokens.
  """
  return pad(encode_prompts(tokenizer, problems), problems, width)


def encode_prompts(
  tokenizer: Tokenizer,
  problems: Sequence[str],
  systems: Sequence[str] = (),
  parts: Callable[[str], chat_templates.Content] = str,
) -> list[list[int]]:
  """Token ids of each problem in its template, however many.

  Args:
    systems: the system message before each problem, '' for none; () for none at all.
    parts: from the text of a message to what the chat template is given in its place.

  Raises:
    ValueError: a system message has no place in the template.
  """
  prompts = [tokenizer.template.replace('{problem}', p) for p in problems]
  if prompts and tokenizer.template.startswith('chat:'):
    backend = tokenizer.backend
    texts = [parts(p.removeprefix('chat:')) for p in prompts]
    try:
      prompts = chat_templates.render(
        backend.get_chat_template(), backend.special_tokens_map, texts, systems
      )
    except ValueError as error:
      raise ValueError(
        f'tokenizer.template: the chat template of {backend.name_or_path!r} cannot be '
        f'used: {error}; write the whole prompt out, without chat:, or mend it'
      ) from None
  elif system := next(filter(None, systems), ''):
    raise ValueError(
      f'tokenizer.template={tokenizer.template[:30]!r} has no place for the system '
      f'message {system[:60]!r} of the problems; begin it with chat:, or take the '
      'system messages out of the data'
    )
  return encode(tokenizer, prompts)


def turn_end(tokenizer: Tokenizer) -> tuple[str, bool] | None:
  """(token, whether it ends a response) that the chat template writes after an answer.

  None without a chat template, or where it writes no special token there.

  Raises:
    ValueError: the chat template fails.
  """
  backend = tokenizer.backend
  if not backend.chat_template:
    return None
  template, names = backend.get_chat_template(), backend.special_tokens_map
  text = chat_templates.ending(template, names)
  special = {*backend.all_special_ids, *backend.added_tokens_decoder}
  for i in backend(text, add_special_tokens=False)['input_ids']:
    if i in special:
      return backend.convert_ids_to_tokens(i), i in tokenizer.eos
  return None


def pad(
  rows: Sequence[list[int]], problems: Sequence[str], width: int
) -> tuple[Int32[np.ndarray, 'N T'], Int32[np.ndarray, ' N']]:
  """(tokens_NT, length_N) of token ids; `problems` are named in the error.

  Raises:
    ValueError: a row has more than `width` tokens.
  """
  tokens_NT = np.zeros((len(rows), width), np.int32)
  for i, row in enumerate(rows):
    if len(row) > width:
      raise ValueError(
        f'prompts.max_prompt_tokens={width} is too small: the prompt of '
        f'{problems[i][:60]!r} has {len(row)} tokens'
      )
    tokens_NT[i, : len(row)] = row
  return tokens_NT, np.asarray([len(row) for row in rows], np.int32)


def encode(tokenizer: Tokenizer, strings: Sequence[str]) -> list[list[int]]:
  """Token ids of each string; no special token is added.

  Raises:
    ValueError: the tokenizer has no token for a character.
  """
  if not strings:
    return []
  rows = tokenizer.backend(list(strings), add_special_tokens=False)['input_ids']
  unknown = tokenizer.backend.unk_token_id
  for string in (s for s, row in zip(strings, rows, strict=True) if unknown in row):
    for character in string:
      if unknown in tokenizer.backend(character, add_special_tokens=False)['input_ids']:
        raise ValueError(
          f'tokenizer.path: no token for {character!r} of {string[:60]!r}; take it out '
          'of the problem or choose another tokenizer'
        )
  return rows


def decode_prompts(
  tokenizer: Tokenizer,
  tokens_NT: ArrayLike,
  length_N: ArrayLike,
  image_token: int | None = None,
) -> list[str]:
  """Each prompt as the policy reads it: in its template, with special tokens.

  Args:
    image_token: its runs, a token for each patch of a picture, are written once, with
      their length: `(<|image_pad|> x 1024)`. None: no token is left out.
  """
  rows = zip(np.asarray(tokens_NT).tolist(), np.asarray(length_N).tolist(), strict=True)
  prompts = [row[:length] for row, length in rows]
  if image_token is None:
    return tokenizer.backend.batch_decode(prompts, skip_special_tokens=False)
  (name,) = tokenizer.backend.batch_decode([[image_token]], skip_special_tokens=False)
  found = []
  for prompt in prompts:
    runs = [(i, len([*run])) for i, run in itertools.groupby(prompt)]
    lengths = iter([n for i, n in runs if i == image_token])
    once = [i for i, n in runs for _ in range(1 if i == image_token else n)]
    (text,) = tokenizer.backend.batch_decode([once], skip_special_tokens=False)
    parts = text.split(name)
    shown = (f'({name} x {n})' for n in lengths)
    found.append(parts[0] + ''.join(next(shown, name) + part for part in parts[1:]))
  return found


def decode_responses(
  tokenizer: Tokenizer, tokens_BT: ArrayLike, response_mask_BT: ArrayLike
) -> list[str]:
  """The response of each row as text, end tokens left out."""
  tokens_BT = np.asarray(tokens_BT)
  ends_BT = np.isin(tokens_BT, np.asarray(tokenizer.eos))
  written_BT = np.asarray(response_mask_BT) & ~ends_BT
  rows = [row[m].tolist() for row, m in zip(tokens_BT, written_BT, strict=True)]
  return tokenizer.backend.batch_decode(rows, skip_special_tokens=False)
