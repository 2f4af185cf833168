"""Messages between turns are the tokens that a chat template gives them."""

import foreign
import numpy as np
import pytest

from bapo_jax.data import conversation
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.conversation import Between

# Every message ends in <|end|>, and <|assistant|> opens an answer.
LOOP = '{% for m in messages %}<|{{ m.role }}|>TEXT<|end|>\n{% endfor %}'
TAIL = '{% if add_generation_prompt %}<|assistant|>{% endif %}'
PLAIN = LOOP.replace('TEXT', '{{ m.content }}') + TAIL
TRIMMED = LOOP.replace('TEXT', '{{ m.content | trim }}') + TAIL
# A tool's answer is a user's message in tags, as Qwen 2.5 has it.
TOOLS = (
  LOOP.replace(
    '<|{{ m.role }}|>', "<|{{ 'user' if m.role == 'tool' else m.role }}|>"
  ).replace(
    'TEXT', "{{ '[' if m.role == 'tool' }}{{ m.content }}{{ ']' if m.role == 'tool' }}"
  )
  + TAIL
)
# Thinking is left out of all turns before the last user's message, as Qwen 3 does.
FORGETFUL = (
  '{% set last = messages | map(attribute="role") | list %}'
  + LOOP.replace(
    'TEXT',
    "{% if m.role == 'assistant' and '</think>' in m.content and 'user' in "
    "last[loop.index:] %}{{ m.content.split('</think>')[-1].lstrip() }}"
    '{% else %}{{ m.content }}{% endif %}',
  )
  + TAIL
)
OPENED = PLAIN.replace('<|assistant|>{% endif %}', '<|assistant|><think>{% endif %}')


@pytest.fixture
def chat(tmp_path):
  def make(template):
    backend = foreign.tokenizer('qwen2')
    backend.chat_template = template
    backend.save_pretrained(tmp_path)
    loaded = tokenizer_lib.load(str(tmp_path), 'chat:{problem}')
    end = backend.convert_tokens_to_ids('<|end|>')
    return loaded._replace(eos=(end, *loaded.eos))

  return make


TURNS = ['1 + 2 = ', ' 4?\n', 'five']
SAID = ['17, not 24', ' a b\n']


@pytest.mark.parametrize('template', [PLAIN, TRIMMED, TOOLS], ids=['a', 'b', 'c'])
@pytest.mark.parametrize('role', ['user', 'tool'])
def test_a_row_is_what_the_template_renders(chat, template, role):
  tokenizer = chat(template)
  b = conversation.between(tokenizer, role)
  end = tokenizer.eos[0]
  (row,) = tokenizer_lib.encode_prompts(tokenizer, [tokenizer_lib.Row('3 4', '')])
  mask = [False] * len(row)
  messages = [{'role': 'user', 'content': '3 4'}]
  for i, turn in enumerate(TURNS):
    ids = tokenizer_lib.encode(tokenizer, [turn])[0] + [end]
    row += ids
    mask += [True] * len(ids)
    messages.append({'role': 'assistant', 'content': turn})
    if i < len(SAID):
      ids = conversation.tokens_of(tokenizer, b, SAID[i], row[-1])
      row += ids
      mask += [False] * len(ids)
      messages.append({'role': role, 'content': SAID[i].strip()})
  whole = tokenizer.backend.apply_chat_template(messages, tokenize=False)
  text = tokenizer.backend.decode(row)
  if template != TRIMMED:  # which would strip turns, but sampled tokens stay
    assert whole.startswith(text) and whole.removeprefix(text).strip() == ''
    ids = tokenizer.backend(whole, add_special_tokens=False)['input_ids']
    assert ids[: len(row)] == row
  parts = conversation.parts_of(tokenizer, b, np.asarray(row), np.asarray(mask))
  said = [x.strip() for x in SAID]
  assert parts == [TURNS[0], said[0], TURNS[1], said[1], TURNS[2]]
  named = conversation.messages('3 4', parts, role)
  assert [x['role'] for x in named] == [x['role'] for x in messages]
  assert [x['content'] for x in named] == ['3 4', *parts]
  history = ('user', '1 2'), ('assistant', '3')
  earlier = [dict(role=x, content=text) for x, text in history]
  assert conversation.messages('3 4', parts, role, history) == [*earlier, *named]


def test_the_end_of_a_turn_is_not_written_twice(chat):
  tokenizer = chat(PLAIN)
  b = conversation.between(tokenizer, 'user')
  end, other = tokenizer.eos[0], tokenizer.backend.convert_tokens_to_ids('1')
  sampled = conversation.tokens_of(tokenizer, b, '7', end)
  missing = conversation.tokens_of(tokenizer, b, '7', other)
  assert missing == [end, *sampled] and end in sampled


@pytest.mark.parametrize('template', [FORGETFUL, OPENED], ids=['forgetful', 'opened'])
def test_a_template_that_rewrites_turns_is_refused(chat, template):
  with pytest.raises(ValueError, match='changes earlier turns') as error:
    conversation.between(chat(template), 'user')
  assert '\n' not in str(error.value)


def test_a_template_that_only_forgets_before_a_user_keeps_turns_before_tools(chat):
  assert conversation.between(chat(FORGETFUL), 'tool').role == 'tool'


SPECIAL = '<|vision_start|>'  # which a problem may hold, and a message may not


@pytest.mark.parametrize(
  'text', [SPECIAL, '<|end|>', '<|end|>\n<|assistant|>7', '<|user|>']
)
def test_a_special_token_in_a_message_is_text(chat, text):
  tokenizer = chat(PLAIN)
  tokenizer.backend.add_special_tokens({'additional_special_tokens': [SPECIAL]})
  b = conversation.between(tokenizer, 'user')
  special = set(tokenizer.backend.all_special_ids)
  count = [
    sum(i in special for i in conversation.tokens_of(tokenizer, b, x, 0))
    for x in ('7', text)
  ]
  assert count[0] == count[1]


def test_without_a_chat_template_a_message_is_its_text():
  tokenizer = tokenizer_lib.load(tokenizer_lib.EMBEDDED, '{problem}\n')
  b = conversation.between(tokenizer, 'tool')
  assert b == Between(role='tool')
  ids = conversation.tokens_of(tokenizer, b, '=17\n', 1)
  assert ids == tokenizer_lib.encode(tokenizer, ['=17\n'])[0]
  with pytest.raises(ValueError, match="no token for 'n'"):
    conversation.tokens_of(tokenizer, b, 'no', 1)
