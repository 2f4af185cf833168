"""Problems become rows of tokens and rows become text, with nothing lost on the way."""

import json
import socket

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_jax.data import chat_templates
from bapo_jax.data import tokenizer as tokenizer_lib

TOKENIZER = tokenizer_lib.load('characters', '{problem}\n')
WRITTEN = tokenizer_lib.CHARACTERS[2:]  # each stands for itself


def test_one_token_per_character_and_one_for_the_box():
  # <pad> 0, <eos> 1, \boxed{ 2, } 3, newline 4, space 5, 0..9 from 6 on, + 16.
  assert tokenizer_lib.encode(TOKENIZER, [r'1+2 \boxed{3}' + '\n', '']) == [
    [7, 16, 8, 5, 2, 9, 3, 4],
    [],
  ]
  assert TOKENIZER.eos == (1,)
  assert len(TOKENIZER.backend) == len(tokenizer_lib.CHARACTERS)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(WRITTEN), max_size=30))
def test_round_trip(tokens):
  string = ''.join(tokens)
  (row,) = tokenizer_lib.encode(TOKENIZER, [string])
  assert row == [tokenizer_lib.CHARACTERS.index(token) for token in tokens]
  mask_BT = np.ones((1, len(row)), bool)
  assert tokenizer_lib.decode_responses(TOKENIZER, np.asarray([row], int), mask_BT) == [
    string
  ]


def test_it_is_a_tokenizer_like_any_other(tmp_path):
  import transformers

  assert isinstance(TOKENIZER.backend, transformers.PreTrainedTokenizerFast)
  TOKENIZER.backend.save_pretrained(tmp_path)
  loaded = tokenizer_lib.load(str(tmp_path), '{problem}\n')
  strings = [''.join(WRITTEN), r'  7 * 8 = \boxed{56}' + '\n\n']
  assert tokenizer_lib.encode(loaded, strings) == tokenizer_lib.encode(
    TOKENIZER, strings
  )
  assert loaded.eos == TOKENIZER.eos
  assert loaded.backend.pad_token_id == 0
  rows = np.asarray([tokenizer_lib.encode(loaded, strings[1:])[0]])
  assert (
    tokenizer_lib.decode_responses(loaded, rows, np.ones(rows.shape, bool))
    == strings[1:]
  )
  with pytest.raises(ValueError, match='no token for'):
    tokenizer_lib.encode(loaded, ['?'])


def test_a_tokenizer_is_its_file_with_any_model(tmp_path):
  TOKENIZER.backend.save_pretrained(tmp_path)
  for kind in ('qwen2', 'qwen3', 'llama'):
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': kind}))
    loaded = tokenizer_lib.load(str(tmp_path), '{problem}')
    assert tokenizer_lib.encode(loaded, [' 1 + 2 ']) == tokenizer_lib.encode(
      TOKENIZER, [' 1 + 2 ']
    )
    assert len(loaded.backend) == len(tokenizer_lib.CHARACTERS)


def test_the_chat_template_wraps_the_problem():
  chat = TOKENIZER._replace(template='chat:{problem}=')
  tokens_NT, length_N = tokenizer_lib.tokenize_prompts(chat, ['1+2'], 6)
  np.testing.assert_array_equal(tokens_NT, [[7, 16, 8, 19, 4, 0]])
  np.testing.assert_array_equal(length_N, [5])


def test_a_chat_template_of_a_file_of_its_own_is_used(tmp_path):
  TOKENIZER.backend.save_pretrained(tmp_path)
  assert tokenizer_lib.load(str(tmp_path), 'chat:{problem}').backend.chat_template
  loop = "{% for m in messages %}{{ '= ' + m['content'] }}{% endfor %}"
  tail = "{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
  (tmp_path / 'chat_template.jinja').write_text(loop + tail)
  chat = tokenizer_lib.load(str(tmp_path), 'chat:{problem}*')
  tokens_NT, _ = tokenizer_lib.tokenize_prompts(chat, ['1+2'], 7)
  np.testing.assert_array_equal(
    tokens_NT, [tokenizer_lib.encode(TOKENIZER, ['= 1+2*\n'])[0]]
  )


def test_a_chat_without_a_template_is_refused(tmp_path):
  tokenizer = tokenizer_lib.characters()
  tokenizer.chat_template = None
  tokenizer.save_pretrained(tmp_path)
  assert tokenizer_lib.load(str(tmp_path), '{problem}').template == '{problem}'
  with pytest.raises(ValueError) as error:
    tokenizer_lib.load(str(tmp_path), 'chat:{problem}')
  assert str(error.value) == (
    "tokenizer.template: 'chat:{problem}' needs a chat template, and "
    f'{str(tmp_path)!r} has none; write the whole prompt out, without chat:'
  )


def test_prompts_are_padded_on_the_right():
  tokens_NT, length_N = tokenizer_lib.tokenize_prompts(TOKENIZER, ['1+2', '3'], 5)
  np.testing.assert_array_equal(tokens_NT, [[7, 16, 8, 4, 0], [9, 4, 0, 0, 0]])
  np.testing.assert_array_equal(length_N, [4, 2])
  assert tokens_NT.dtype == length_N.dtype == np.int32
  tokens_NT, length_N = tokenizer_lib.tokenize_prompts(TOKENIZER, [], 5)
  assert tokens_NT.shape == (0, 5) and length_N.shape == (0,)


def test_a_problem_that_is_too_long_is_named():
  with pytest.raises(ValueError) as error:
    tokenizer_lib.tokenize_prompts(TOKENIZER, ['1', '1+2'], 3)
  assert str(error.value) == (
    "prompts.max_prompt_tokens=3 is too small: the prompt of '1+2' has 4 tokens"
  )


def test_a_response_is_its_mask_without_the_end_token():
  # Row 0: prompt 1+, response 23 and its end. Row 1: cut, no end. Row 2: an empty seat.
  tokens_BT = np.asarray([[7, 16, 8, 9, 1, 0], [7, 16, 8, 9, 9, 9], [0] * 6])
  response_mask_BT = np.asarray([[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], [0] * 6], bool)
  assert tokenizer_lib.decode_responses(TOKENIZER, tokens_BT, response_mask_BT) == [
    '23',
    '2333',
    '',
  ]
  # A padding token that the policy sampled is a part of its response.
  assert tokenizer_lib.decode_responses(
    TOKENIZER, tokens_BT[:1] * 0, response_mask_BT[:1]
  ) == ['<pad>' * 3]


@pytest.mark.parametrize(
  ('problem', 'character'), [('1+?', '?'), ('é=2', 'é'), (r'\boxe', '\\')]
)
def test_an_unknown_character_is_named(problem, character):
  with pytest.raises(ValueError) as error:
    tokenizer_lib.tokenize_prompts(TOKENIZER, ['1+1', problem], 9)
  assert str(error.value) == (
    f'tokenizer.path: no token for {character!r} of {problem + chr(10)!r}; take it out '
    'of the problem or choose another tokenizer'
  )


@pytest.mark.parametrize('name', ['/no/such/directory', 'no/such', 'nosuch', 'empty'])
def test_a_tokenizer_that_is_not_there_is_refused_at_once(name, monkeypatch, tmp_path):
  def refuse(host, *args, **kwargs):
    looked_up.append(host)
    raise socket.gaierror(f'{host} is out of reach')

  looked_up = []
  monkeypatch.setattr(socket, 'getaddrinfo', refuse)
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'empty').mkdir()
  with pytest.raises(ValueError) as error:
    tokenizer_lib.load(name, '{problem}')
  assert looked_up == []
  message = str(error.value)
  assert '\n' not in message and 'tokenizer.json' in message
  reason = f'cannot load {name!r};' if name == 'empty' else f'no directory {name!r}'
  assert message.startswith(f'tokenizer.path: {reason}')


def test_the_ends_are_the_tokenizers_and_the_generation_configs(tmp_path):
  TOKENIZER.backend.save_pretrained(tmp_path)
  for listed, ends in (([4, 1, 3], (1, 4, 3)), (4, (1, 4)), (None, (1,))):
    (tmp_path / 'generation_config.json').write_text(
      json.dumps({'eos_token_id': listed})
    )
    assert tokenizer_lib.load(str(tmp_path), '{problem}').eos == ends


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
  tokenizer = tokenizer_lib.characters()
  tokenizer.eos_token = None
  tokenizer.save_pretrained(tmp_path)
  with pytest.raises(ValueError, match='names no end token; add eos_token_id to its'):
    tokenizer_lib.load(str(tmp_path), '{problem}')


def test_chat_templates_are_rendered_as_transformers_renders_them(tmp_path):
  backend = tokenizer_lib.characters()
  backend.chat_template = (
    '{{ bos_token }}{% for m in messages %}{{ m.role|length }}{{ m.content|trim }}'
    '{{ eos_token }}{% endfor %}{% if add_generation_prompt %}={% endif %}'
  )
  texts = [f' {i} + {i}' for i in range(50)]
  expected = [
    backend.apply_chat_template(
      [{'role': 'user', 'content': text}], add_generation_prompt=True, tokenize=False
    )
    for text in texts
  ]
  template = backend.get_chat_template()
  found = chat_templates.render(template, backend.special_tokens_map, texts)
  assert found == expected
  assert expected[3] == '43 + 3<eos>='


# ChatML, with the system message that a model brings where none is given.
CHATML = (
  "{% if messages[0].role != 'system' %}<system>Help.\n{% endif %}"
  '{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}'
  '{% if add_generation_prompt %}<assistant>{% endif %}'
)


def test_a_system_message_is_rendered_before_its_problem():
  assert chat_templates.render(CHATML, {}, ['1+1', '2+2'], ['Be brief.', '']) == [
    '<system>Be brief.\n<user>1+1\n<assistant>',
    '<system>Help.\n<user>2+2\n<assistant>',
  ]


def test_a_system_message_reaches_the_tokens():
  backend = tokenizer_lib.characters()
  backend.chat_template = '{% for m in messages %}{{ m.content }}={% endfor %}'
  chat = tokenizer_lib.Tokenizer(backend, (1,), 'chat:{problem}+')
  rows = tokenizer_lib.encode_prompts(chat, ['1', '2'], ['33', ''])
  assert [backend.decode(row) for row in rows] == ['33=1+=', '2+=']


def test_a_system_message_without_a_place_is_refused():
  with pytest.raises(ValueError) as error:
    tokenizer_lib.encode_prompts(TOKENIZER, ['1+1', '1+2'], ['', 'Be brief.'])
  assert str(error.value) == (
    "tokenizer.template='{problem}\\n' has no place for the system message 'Be brief.' "
    'of the problems; begin it with chat:, or take the system messages out of the data'
  )
  assert tokenizer_lib.encode_prompts(TOKENIZER, ['1'], ['']) == [[7, 4]]
  # The embedded template writes the last message alone.
  chat = TOKENIZER._replace(template='chat:{problem}')
  with pytest.raises(ValueError, match="leaves out the system message 'Be brief'"):
    tokenizer_lib.encode_prompts(chat, ['1+1'], ['Be brief'])


def test_prompts_come_back_as_the_policy_reads_them():
  backend = tokenizer_lib.characters()
  backend.chat_template = '<eos>{{ messages[0].content }}<eos>='
  chat = tokenizer_lib.Tokenizer(backend, (1,), 'chat:{problem} mod 7')
  tokens_NT, length_N = tokenizer_lib.tokenize_prompts(chat, ['1+1', '10'], 20)
  found = tokenizer_lib.decode_prompts(chat, tokens_NT, length_N)
  assert found == ['<eos>1+1 mod 7<eos>=', '<eos>10 mod 7<eos>=']


def test_the_patches_of_a_picture_are_written_as_their_number():
  tokenizer = tokenizer_lib.Tokenizer(tokenizer_lib.characters(), (1,), '{problem}')
  image = tokenizer_lib.CHARACTERS.index(tokenizer_lib.IMAGE)
  texts = ['<image>' * 16 + '7*<image><image>3', '<image>=1', '4']
  rows = tokenizer_lib.encode(tokenizer, texts)
  tokens_NT, length_N = tokenizer_lib.pad(rows, texts, 24)
  assert tokenizer_lib.decode_prompts(tokenizer, tokens_NT, length_N) == texts
  found = tokenizer_lib.decode_prompts(tokenizer, tokens_NT, length_N, image)
  assert found == ['(<image> x 16)7*(<image> x 2)3', '(<image> x 1)=1', '4']


def test_a_chat_template_that_never_ends_is_stopped():
  loop, end = '{% for i in range(99999) %}', '{% endfor %}'
  with pytest.raises(
    ValueError, match='does not end within 3 seconds of processor time'
  ):
    chat_templates.render(loop * 6 + end * 6, {}, ['1'])
  # For one message in many, which a trial with the first would not show.
  template = f"{{% if messages[0].content == '7' %}}{loop * 6}{end * 6}{{% endif %}}"
  with pytest.raises(
    ValueError, match='does not end within 3 seconds of processor time'
  ):
    chat_templates.render(template, {}, [str(i) for i in range(9)])


@pytest.mark.parametrize(
  ('template', 'reason'),
  [
    ("{{ 'x' * 10**11 }}", 'takes too much memory'),
    ('{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}', 'calls itself without end'),
    ("{{ raise_exception('no users') }}", 'TemplateError: no users'),
    ('{% for', 'TemplateSyntaxError: '),
  ],
)
def test_a_chat_template_that_fails_says_why(template, reason):
  with pytest.raises(ValueError, match=reason):
    chat_templates.render(template, {}, ['1'])
