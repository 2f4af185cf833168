r"""Tokenizers and prompt templates: the only importer of transformers.

1. `load` opens the tokenizer in a directory; 'characters' makes the embedded one;
2. `Text` keeps what the rest of the run needs of it: ids of padding and of ends;
3. `ask` turns problems into token rows through a template, `read` turns rows into text;
   `encode_prompts` and `pad` are the two halves of `ask`.
"""

import os
import shutil
from typing import Any, NamedTuple

import numpy as np

# Only tokenizers are used: that torch is missing is nothing to be warned about.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

# What the embedded problems are written in. `\boxed{` is one token: an answer costs
# three, not nine.
CHARACTERS = ('<pad>', '<eos>', r'\boxed{', *'}\n 0123456789+-*=|modx/()')


class Tokenizer(NamedTuple):
  backend: Any  # of transformers
  eos: tuple[int, ...]  # every token that ends a response
  template: (
    str  # '{problem}' in a user's words, or 'chat:' + those for the chat template
  )


def characters():
  """A fast tokenizer of one token a character, as transformers would load it."""
  import tokenizers
  import transformers

  vocab = {token: i for i, token in enumerate(CHARACTERS)}
  model = tokenizers.models.WordLevel(vocab, unk_token='<pad>')
  backend = tokenizers.Tokenizer(model)
  # Every \boxed{, else every single character, is a word of its own.
  pattern = tokenizers.Regex(r'\\boxed\{|[\s\S]')
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, 'isolated')
  backend.decoder = tokenizers.decoders.Fuse()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    unk_token='<pad>',  # what `encode` refuses to write
    pad_token='<pad>',
    eos_token='<eos>',
    clean_up_tokenization_spaces=False,
    chat_template="{{ messages[-1]['content'] + '\\n' }}",  # Jinja drops a last newline
  )


def load(tokenizer: str, template: str) -> Tokenizer:
  """The tokenizer in a directory, or the embedded one: 'characters'.

  Raises:
    ValueError: the template has no {problem}, or the tokenizer is not to be had.
  """
  if '{problem}' not in template:
    raise ValueError(f'tokenizer.template: {template!r} does not contain {{problem}}')
  if tokenizer == 'characters':
    made = characters()
    return Tokenizer(made, (made.eos_token_id,), template)
  # transformers would ask the hub for the name: 47 s where there is no network.
  if not os.path.isdir(tokenizer):
    raise ValueError(
      f'tokenizer.path: no directory {tokenizer!r}; give one that holds '
      "tokenizer.json, or 'characters'"
    )
  import transformers

  try:
    # tokenizer.json to the letter. AutoTokenizer goes by config.json: beside that of a
    # Qwen2 it drops this file's splitting for Qwen's own, whoever's tokenizer it is.
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer)
  except (OSError, ValueError) as error:
    raise ValueError(
      f'tokenizer.path: cannot load {tokenizer!r}; give a directory that holds '
      f'tokenizer.json ({str(error).splitlines()[0].rstrip(".: ")})'
    ) from error
  if template.startswith('chat:') and not loaded.chat_template:
    raise ValueError(
      f'tokenizer.template: {template[:30]!r} asks for a chat template, and {tokenizer!r} '
      'has none; write the whole prompt out, without chat:'
    )
  return Tokenizer(loaded, _ends(tokenizer, loaded), template)


# What the tokenizers of different versions and families consist of.
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
  """The tokenizer's files into the directory `path`: copied where `source` has them."""
  if not os.path.isdir(source):
    tokenizer.backend.save_pretrained(path)
    return
  for name in FILES:
    if os.path.exists(os.path.join(source, name)):
      shutil.copyfile(os.path.join(source, name), os.path.join(path, name))


def _ends(path: str, tokenizer) -> tuple[int, ...]:
  """End tokens: the tokenizer's own and all that generation_config.json lists."""
  import transformers

  ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
  if os.path.exists(os.path.join(path, 'generation_config.json')):
    listed = transformers.GenerationConfig.from_pretrained(path).eos_token_id
    ends += listed if isinstance(listed, list) else [listed]
  ends = tuple(dict.fromkeys(i for i in ends if i is not None))
  if not ends:
    raise ValueError(
      f'tokenizer.path: {path!r} names no end token; add eos_token_id to its '
      'generation_config.json'
    )
  return ends


def tokenize_prompts(tokenizer: Tokenizer, problems: list[str], width: int):
  """(tokens_NT int32 padded to `width` on the right, length_N int32).

  Raises:
    ValueError: a prompt has more than `width` tokens.
  """
  return pad(encode_prompts(tokenizer, problems), problems, width)


def encode_prompts(tokenizer: Tokenizer, problems: list[str]) -> list[list[int]]:
  """Token ids of each problem in its template, however many."""
  prompts = [tokenizer.template.replace('{problem}', p) for p in problems]
  if prompts and tokenizer.template.startswith('chat:'):
    prompts = [
      tokenizer.backend.apply_chat_template(
        [{'role': 'user', 'content': p.removeprefix('chat:')}],
        add_generation_prompt=True,
        tokenize=False,
      )
      for p in prompts
    ]
  return encode(tokenizer, prompts)


def pad(rows: list[list[int]], problems: list[str], width: int):
  """As `ask`, of token ids; `problems` are named in the error."""
  tokens_NT = np.zeros((len(rows), width), np.int32)
  for i, row in enumerate(rows):
    if len(row) > width:
      raise ValueError(
        f'prompts.max_prompt_tokens={width} is too small: the prompt of {problems[i][:60]!r} has '
        f'{len(row)} tokens'
      )
    tokens_NT[i, : len(row)] = row
  return tokens_NT, np.asarray([len(row) for row in rows], np.int32)


def encode(tokenizer: Tokenizer, strings: list[str]) -> list[list[int]]:
  """Token ids of each string; no special token is added.

  Raises:
    ValueError: the tokenizer has no token for a character.
  """
  if not strings:
    return []
  rows = tokenizer.backend(strings, add_special_tokens=False)['input_ids']
  unknown = tokenizer.backend.unk_token_id
  for string in (s for s, row in zip(strings, rows, strict=True) if unknown in row):
    for character in string:
      if unknown in tokenizer.backend(character, add_special_tokens=False)['input_ids']:
        raise ValueError(
          f'tokenizer.path: no token for {character!r} of {string[:60]!r}; take it out '
          'of the problem or choose another tokenizer'
        )
  return rows


def decode_responses(tokenizer: Tokenizer, tokens_BT, response_mask_BT) -> list[str]:
  """What each row's policy wrote, end and padding tokens left out."""
  ends = np.asarray(tokenizer.eos)
  keep = np.asarray(response_mask_BT) & ~np.isin(tokens_BT, ends)
  rows = [row[k].tolist() for row, k in zip(np.asarray(tokens_BT), keep, strict=True)]
  return tokenizer.backend.batch_decode(rows, skip_special_tokens=False)
