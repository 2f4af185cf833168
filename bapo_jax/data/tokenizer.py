r"""Loads tokenizers and renders prompts; the only module that imports transformers.

Chat templates run in transformers' Jinja sandbox. No code of a model directory runs.
"""

import datetime
import functools
import itertools
import os
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bapo_jax.data.pictures import PLACEHOLDER
from bapo_jax.data.row import Row
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.runtime import files
from bapo_jax.runtime.files import first_line

# Silences the warning that torch is missing: tokenizers do not need it.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

# The tokenizer of the embedded policy has one token per character of its problems, and
# `\boxed{` is one token: an answer costs three tokens, not nine.
EMBEDDED = str(pathlib.Path(__file__).parents[1] / 'policies' / 'tokenizer')
IMAGE = '<image>'  # its token that stands for a merged patch of a picture
# The date for chat templates that ask for today's, so that prompts do not depend on the
# day of a run. Llama 3's templates use it where they cannot ask.
TODAY = datetime.datetime(2024, 7, 26)


class Tokenizer(NamedTuple):
  backend: Any  # transformers.PreTrainedTokenizerFast
  eos: tuple[int, ...]  # every token that ends a response; the first ends given ones
  template: str  # prompt with {problem}, or 'chat:' and the user message to render

  def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
    """Returns the text of each row of tokens, special tokens included, as written.

    Some tokenizers would remove blanks: `3. 5` for `3 . 5`.
    """
    return self.backend.batch_decode(
      rows, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def directory(path: str) -> str:
  """Returns the directory that tokenizer.path names; downloads that of a hub name."""
  if hf_directory.parse_hub_name(path):
    return hf_directory.find(path, 'tokenizer.path', ('tokenizer.json',))
  return path


def load(path: str, template: str) -> Tokenizer:
  """Loads the tokenizer of a directory.

  Raises:
    ValueError: the tokenizer cannot be loaded, or has no end token or chat template.
  """
  # Otherwise transformers would query the hub: 47 s without a network.
  if not os.path.isdir(path):
    raise ValueError(
      f'tokenizer.path: no directory {path!r}{hf_directory.hint(path)}; give a '
      'directory with tokenizer.json'
    )
  import transformers

  try:
    # Uses tokenizer.json unchanged. AutoTokenizer follows config.json: for Qwen2 it
    # replaces the splitting rules of tokenizer.json with Qwen's.
    backend: Any = transformers.PreTrainedTokenizerFast.from_pretrained(path)
  except Exception as error:  # transformers raises many types
    raise ValueError(
      f'tokenizer.path: cannot load {path!r} ({first_line(error)}); give a '
      'directory with a complete tokenizer.json that this version of transformers reads'
    ) from error
  if template.startswith('chat:') and not backend.chat_template:
    raise ValueError(
      f'tokenizer.template={template[:30]!r} needs a chat template, but {path!r} has '
      "none; remove the prefix 'chat:' and write the whole prompt"
    )
  tokenizer = Tokenizer(backend, _end_tokens(path, backend), template)
  if template.startswith('chat:') and (end := turn_end(tokenizer)) and end[1]:
    # Gemma's end of a text differs from its end of a turn; a chat has the latter.
    first = backend.convert_tokens_to_ids(end[0])
    tokenizer = tokenizer._replace(eos=tuple(dict.fromkeys((first, *tokenizer.eos))))
  return tokenizer


# Tokenizer files of all versions and model families.
FILES = (
  *('tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json'),
  *('added_tokens.json', 'vocab.json', 'merges.txt', 'tokenizer.model'),
  *('chat_template.jinja', 'chat_template.json'),
)


def save(source: str, path: str) -> None:
  """Copies the files of a tokenizer from the directory `source` to `path`."""
  for name in FILES:
    if os.path.exists(os.path.join(source, name)):
      shutil.copyfile(os.path.join(source, name), os.path.join(path, name))


def _end_tokens(path, backend):
  """Returns the end tokens; reads config.json if no other file names an end token."""
  ends = [backend.eos_token_id]
  for name in ('generation_config.json', 'config.json'):
    file = os.path.join(path, name)
    if os.path.exists(file):
      listed = files.read_object(file).get('eos_token_id')
      ends += listed if isinstance(listed, list) else [listed]
    ends = [i for i in ends if i is not None]
    if ends:
      return tuple(dict.fromkeys(ends))
  raise ValueError(
    f'tokenizer.path: {path!r} has no end token; add eos_token_id to its '
    'generation_config.json'
  )


def encode_prompts(
  tokenizer: Tokenizer, rows: Sequence[Row], image: str = ''
) -> list[list[int]]:
  """Returns the token ids of each problem's prompt, without a length limit.

  With a plain template the tokenizer adds the special tokens that precede a text; a
  chat template contains them. Special tokens in a problem or system message are encoded
  as text. `image` is the token that replaces each <image> of a problem; '' keeps
  <image>.

  Raises:
    ValueError: the chat template fails, or the template cannot hold a system message
      or earlier turns.
  """
  template = tokenizer.template
  start = []
  divide = functools.partial(without_special, special_tokens(tokenizer.backend))
  rows = [
    row._replace(
      problem=divide(row.problem),
      system=divide(row.system),
      history=tuple((role, divide(text)) for role, text in row.history),
    )
    for row in rows
  ]
  if template.startswith('chat:'):
    prompts = _render_prompts(tokenizer, rows, pictured=bool(image))
  elif system := next((row.system for row in rows if row.system), ''):
    raise ValueError(
      f'tokenizer.template={template[:30]!r} has no place for the system message '
      f"{system[:60]!r} of the problems; start the template with 'chat:', which needs "
      'a model with a chat template, or remove the system messages from the data'
    )
  elif history := next((row.history for row in rows if row.history), ()):
    raise ValueError(
      f'tokenizer.template={template[:30]!r} has no place for earlier turns of a '
      f"conversation, such as {history[0][1][:60]!r}; start the template with 'chat:', "
      'which needs a model with a chat template, or write each prompt as one text'
    )
  else:
    texts = [row.problem.replace(PLACEHOLDER, image or PLACEHOLDER) for row in rows]
    prompts = [template.replace('{problem}', text) for text in texts]
    encoded = tokenizer.backend('1', return_special_tokens_mask=True)
    start = encoded['input_ids'][: encoded['special_tokens_mask'].index(0)]
  ids_N = []
  for prompt in prompts:
    ids = encode_parts(tokenizer, prompt)
    # The template may begin with these tokens itself.
    ids_N.append(ids if ids[: len(start)] == start else start + ids)
  return ids_N


def without_special(special: re.Pattern[str], text: str) -> str:
  """Makes special tokens in a text plain, for `encode_parts`.

  A NUL character, which no text contains, divides the token.
  """
  return special.sub(lambda x: f'{x[0][0]}\0{x[0][1:]}', text)


def encode_parts(tokenizer: Tokenizer, text: str) -> list[int]:
  """Returns the token ids of a text; what NUL characters divide is encoded apart."""
  return list(itertools.chain(*encode(tokenizer, text.split('\0'))))


def special_tokens(backend: Any, spared: str = 'image|vision') -> re.Pattern[str]:
  """Returns a pattern of the special tokens, by default not of those for pictures."""
  tokens = [
    re.escape(str(token))
    for token in backend.added_tokens_decoder.values()
    if token.special and not re.search(spared, str(token))
  ]
  return re.compile('|'.join(tokens) or '(?!)')


def _render_prompts(tokenizer: Tokenizer, rows: Sequence[Row], *, pictured):
  """Renders each problem as a chat that ends where the assistant's answer begins."""
  template = tokenizer.template.removeprefix('chat:')

  def message(role: str, content: Any) -> dict[str, Any]:
    if pictured and PLACEHOLDER in content and role != 'system':
      content = [
        {'type': 'image'} if text == PLACEHOLDER else {'type': 'text', 'text': text}
        for text in re.split(f'({re.escape(PLACEHOLDER)})', content)
        if text
      ]
    return {'role': role, 'content': content}

  earlier = [
    [*[('system', row.system)] * bool(row.system), *row.history] for row in rows
  ]
  conversations = [
    [message(*turn) for turn in turns]
    + [message('user', template.replace('{problem}', row.problem))]
    for row, turns in zip(rows, earlier, strict=True)
  ]
  prompts = render(tokenizer.backend, conversations, answered=False)
  for turns, prompt in zip(earlier, prompts, strict=True):
    for role, text in turns:
      # Templates may shorten the assistant's turns, and quote those of tools.
      is_kept = all(part.strip() in prompt for part in text.split(PLACEHOLDER))
      if role in ('system', 'user') and not is_kept:
        raise ValueError(
          'tokenizer.template: the chat template of '
          f'{tokenizer.backend.name_or_path!r} leaves out the {role} message '
          f'{text[:60]!r}; correct the chat template or remove the {role} messages '
          'from the data'
        )
  return prompts


def render(backend: Any, conversations: Sequence[Any], *, answered: bool) -> list[str]:
  """Returns each chat as text; if not `answered`, up to where the answer begins.

  If the chat template has no system role, a system message is put before the first
  user message. Raises a ValueError if the chat template fails.
  """
  if not conversations:
    return []
  try:
    template = re.sub(
      r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""",
      lambda x: repr(TODAY.strftime(x[2])),
      backend.get_chat_template(),
    )
    apply = functools.partial(
      backend.apply_chat_template,
      tokenize=False,
      add_generation_prompt=not answered,
      chat_template=template,
    )
    try:
      return apply(conversations)
    except Exception:  # such as `System role not supported` of Gemma 2
      folded = [_without_system(turns) for turns in conversations]
      if folded == conversations:
        raise
      return apply(folded)
  except Exception as error:  # a template may raise any exception
    reason = ' '.join(f'{type(error).__name__}: {error}'.split())[:200]
    raise ValueError(
      f'tokenizer.template: the chat template of {backend.name_or_path!r} fails '
      f'({reason}); correct the chat template, or write the whole prompt in '
      "tokenizer.template without the prefix 'chat:'"
    ) from error


def _without_system(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns a chat with its system message put before the first user message."""
  roles = [turn['role'] for turn in turns]
  if roles[:1] != ['system'] or 'user' not in roles:
    return [*turns]
  system, *others = turns
  text = f'{system["content"]}\n\n'
  at = roles.index('user') - 1
  content = others[at]['content']
  if isinstance(content, str):
    content = text + content
  else:  # parts of a message with pictures
    content = [{'type': 'text', 'text': text}, *content]
  return [*others[:at], others[at] | {'content': content}, *others[at + 1 :]]


def turn_end(tokenizer: Tokenizer) -> tuple[str, bool] | None:
  """Returns (special token after an answer in a chat, whether sampling ends there).

  Returns None without such a token. Raises a ValueError if the chat template fails.
  """
  backend = tokenizer.backend
  if not backend.chat_template:
    return None
  answer = 'forty-two'
  exchange = [
    {'role': 'user', 'content': 'six times seven'},
    {'role': 'assistant', 'content': answer},
  ]
  (text,) = render(backend, [exchange], answered=True)
  for i in _ids(backend, text.partition(answer)[2]):
    if i in backend.added_tokens_decoder:
      return backend.convert_ids_to_tokens(i), i in tokenizer.eos
  return None


def _ids(backend, text: str | list[str]):
  return backend(text, add_special_tokens=False)['input_ids']


def encode(tokenizer: Tokenizer, strings: Sequence[str]) -> list[list[int]]:
  """Returns the token ids of each string; adds no special tokens.

  Raises:
    ValueError: the tokenizer has no token for a character.
  """
  if not strings:
    return []
  backend = tokenizer.backend
  rows = _ids(backend, list(strings))
  for string, row in zip(strings, rows, strict=True):
    if backend.unk_token_id not in row:
      continue
    # Where each token is in the string: a character alone may be unknown that is part
    # of a known token, such as the < of <eos>.
    places = backend(string, add_special_tokens=False, return_offsets_mapping=True)
    for i, (start, end) in zip(row, places['offset_mapping'], strict=True):
      text = string[start:end]
      if i == backend.unk_token_id and backend.unk_token not in text:
        raise ValueError(
          f'tokenizer.path: no token for {text!r} in {string[:60]!r}; remove '
          'the character from the problem or choose another tokenizer'
        )
  return rows


def decode_prompts(
  tokenizer: Tokenizer,
  tokens_NT: ArrayLike,
  length_N: ArrayLike,
  image_token: int | None = None,
) -> list[str]:
  """Returns the text of each prompt, tokens_NT[n, :length_N[n]], with special tokens.

  A run of image_token, unless this is None, is written `(<|image_pad|> x 1024)`.
  """
  rows = zip(np.asarray(tokens_NT), np.asarray(length_N), strict=True)
  texts = tokenizer.decode([row[:length].tolist() for row, length in rows])
  if image_token is None:
    return texts
  (name,) = tokenizer.decode([[image_token]])
  runs = re.compile(rf'(?:{re.escape(name)})+')
  return [
    runs.sub(lambda run: f'({name} x {len(run[0]) // len(name)})', text)
    for text in texts
  ]


def decode_responses(
  tokenizer: Tokenizer, tokens_BT: ArrayLike, response_mask_BT: ArrayLike
) -> list[str]:
  """Returns the text of each response, without end tokens."""
  tokens_BT = np.asarray(tokens_BT)
  ends_BT = np.isin(tokens_BT, tokenizer.eos)
  written_BT = np.asarray(response_mask_BT) & ~ends_BT
  rows = [row[m].tolist() for row, m in zip(tokens_BT, written_BT, strict=True)]
  return tokenizer.decode(rows)


def ends(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[int, ...]:
  """Returns the characters of a response up to the end of each of its tokens."""
  written = zip(ids, pieces(tokenizer, ids), strict=True)
  sizes = (0 if i in tokenizer.eos else len(piece) for i, piece in written)
  return tuple(itertools.accumulate(sizes))


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
  """Returns the text of each token; together they are the text of all tokens.

  A character that takes several tokens is the text of the last; the others have ''.
  """
  (text,) = tokenizer.decode([ids])
  texts: list[str] = []
  earlier: list[int] = []
  tokens: list[int] = []
  for token in ids:
    tokens.append(token)
    # Decodes after earlier tokens: some tokenizers drop a blank at the start of a text.
    before, both = tokenizer.decode([earlier, earlier + tokens])
    piece = both.removeprefix(before)
    if piece and text.startswith(piece):
      text = text.removeprefix(piece)
      # Bytes that are no character are only read right together.
      earlier = earlier + tokens if '\ufffd' in piece else tokens
      tokens = []
    else:
      piece = ''
    texts.append(piece)
  if texts:
    texts[-1] += text
  return texts
