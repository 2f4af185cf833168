"""Problems become rows of tokens and rows become text, with nothing lost on the way."""

import functools
import json

import foreign
import making
import numpy as np
import pytest
import tokenizers
import transformers
from refusals import sentence_of

from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.conversation import Between
from bapo_jax.data.row import Row
from bapo_jax.rollout import given as given_lib
from bapo_jax.types import ended

TOKENIZER = tokenizer_lib.load(tokenizer_lib.EMBEDDED, '{problem}\n')
WRITTEN = making.CHARACTERS[2:]  # each stands for itself


def rows_of(*problems):
  return [Row(problem, '') for problem in problems]


def texts(tokenizer, rows):
  """The prompts of these rows, decoded."""
  ids_N = tokenizer_lib.encode_prompts(tokenizer, rows)
  return [tokenizer.backend.decode(ids) for ids in ids_N]


def chat(template, prompt='chat:{problem}'):
  """The embedded tokenizer with this chat template."""
  backend = tokenizer_lib.load(tokenizer_lib.EMBEDDED, '').backend
  backend.chat_template = template
  return tokenizer_lib.Tokenizer(backend, (1,), prompt)


def test_one_token_per_character_and_one_for_the_box():
  # <pad> 0, <eos> 1, \boxed{ 2, } 3, newline 4, space 5, 0..9 from 6 on, + 16.
  assert tokenizer_lib.encode(TOKENIZER, [r'1+2 \boxed{3}' + '\n', '']) == [
    [7, 16, 8, 5, 2, 9, 3, 4],
    [],
  ]
  assert TOKENIZER.eos == (1,)
  assert len(TOKENIZER.backend) == len(making.CHARACTERS)


@pytest.mark.parametrize('kind', ['', 'qwen2', 'llama'])
def test_it_is_a_tokenizer_like_any_other_with_any_model(kind, tmp_path):
  TOKENIZER.backend.save_pretrained(tmp_path)
  if kind:
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': kind}))
  loaded = tokenizer_lib.load(str(tmp_path), '{problem}\n')
  assert len(loaded.backend) == len(making.CHARACTERS)
  strings = [''.join(WRITTEN), r'  7 * 8 = \boxed{56}' + '\n\n']
  ids = tokenizer_lib.encode(loaded, strings)
  assert ids == tokenizer_lib.encode(TOKENIZER, strings)
  assert loaded.eos == TOKENIZER.eos and loaded.backend.pad_token_id == 0
  rows = np.asarray(ids[1:])
  written = tokenizer_lib.decode_responses(loaded, rows, np.ones(rows.shape, bool))
  assert written == strings[1:]


def test_a_chat_template_of_a_file_of_its_own_is_used(tmp_path):
  TOKENIZER.backend.save_pretrained(tmp_path)
  loop = "{% for m in messages %}{{ '= ' + m['content'] }}{% endfor %}"
  tail = "{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
  (tmp_path / 'chat_template.jinja').write_text(loop + tail)
  loaded = tokenizer_lib.load(str(tmp_path), 'chat:{problem}*')
  assert texts(loaded, rows_of('1+2')) == ['= 1+2*\n']


@pytest.mark.parametrize(
  ('part', 'template', 'message'),
  [
    ('chat_template', 'chat:{problem}', 'needs a chat template'),
    ('eos_token', '{problem}', 'no end token; add eos_token_id'),
  ],
)
def test_a_tokenizer_that_lacks_a_part_is_refused(part, template, message, tmp_path):
  tokenizer = tokenizer_lib.load(tokenizer_lib.EMBEDDED, '').backend
  setattr(tokenizer, part, None)
  tokenizer.save_pretrained(tmp_path)
  with pytest.raises(ValueError, match=message):
    tokenizer_lib.load(str(tmp_path), template)


def test_a_response_is_its_mask_without_the_end_token():
  # Row 0: prompt 1+, response 23 and its end. Row 1: cut, no end. Row 2: an empty seat.
  tokens_BT = np.asarray([[7, 16, 8, 9, 1, 0], [7, 16, 8, 9, 9, 9], [0] * 6])
  response_mask_BT = np.asarray([[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], [0] * 6], bool)
  decode = functools.partial(tokenizer_lib.decode_responses, TOKENIZER)
  assert decode(tokens_BT, response_mask_BT) == ['23', '2333', '']
  # A padding token that the policy sampled is a part of its response.
  assert decode(tokens_BT[:1] * 0, response_mask_BT[:1]) == ['<pad>' * 3]


@pytest.mark.parametrize(('problem', 'character'), [('é=2', 'é'), (r'\boxe', '\\')])
def test_an_unknown_character_is_named(problem, character):
  rows = rows_of('1+1', problem)
  wrong = f'tokenizer.path: no token for {character!r} in {problem + chr(10)!r}'
  assert wrong in sentence_of(tokenizer_lib.encode_prompts, TOKENIZER, rows)


def test_an_unknown_character_is_named_behind_a_special_token():
  assert "no token for 'Q' in '<eos>1Q'" in sentence_of(
    tokenizer_lib.encode, TOKENIZER, ['<eos>1+1', '<eos>1Q']
  )


@pytest.mark.parametrize(
  ('own', 'generation', 'config', 'ends'),
  [
    (True, [4, 1, 3], 5, (1, 4, 3)),
    (True, None, 5, (1,)),
    (False, 4, [3, 1], (4,)),
    (False, None, [3, 1], (3, 1)),
  ],
)
def test_the_ends_are_named_by_the_first_file(tmp_path, own, generation, config, ends):
  backend = tokenizer_lib.load(tokenizer_lib.EMBEDDED, '').backend
  if not own:
    backend.eos_token = None
  backend.save_pretrained(tmp_path)
  for name, value in (('generation_config', generation), ('config', config)):
    (tmp_path / f'{name}.json').write_text(json.dumps({'eos_token_id': value}))
  assert tokenizer_lib.load(str(tmp_path), '{problem}').eos == ends


def with_ends(path, end=' <|end|>'):
  """A published tokenizer that writes BOS before and EOS after a text."""
  backend = foreign.tokenizer('qwen2')
  ids = [(token, backend.convert_tokens_to_ids(token)) for token in foreign.SPECIAL]
  backend.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single=f'<|user|> $A{end}', special_tokens=ids
  )
  backend.save_pretrained(path)
  return str(path), dict(ids)


@pytest.mark.parametrize('end', ['', ' <|end|>'])
def test_a_plain_prompt_begins_as_the_tokenizer_begins_a_text(end, tmp_path):
  path, ids = with_ends(tmp_path / 'a', end=end)
  plain = tokenizer_lib.load(path, '{problem}\n')
  (found,) = tokenizer_lib.encode_prompts(plain, rows_of('1 + 2'))
  expected = plain.backend('1 + 2\n')['input_ids']  # with BOS, and EOS if it has one
  assert found == (expected[:-1] if end else expected)
  assert found.count(ids['<|user|>']) == 1 and ids['<|end|>'] not in found
  # Templates that write BOS themselves.
  for template in ('<|user|>{problem}\n', 'chat:{problem}'):
    own = tokenizer_lib.load(path, template)
    (found,) = tokenizer_lib.encode_prompts(own, rows_of('1 + 2'))
    assert found[0] == ids['<|user|>'] and found.count(ids['<|user|>']) == 1
  # A solution or a response is no prompt.
  assert tokenizer_lib.encode(plain, ['1'])[0][0] != ids['<|user|>']


@pytest.mark.parametrize('template', ['{problem}<|assistant|>', 'chat:{problem}'])
def test_a_special_token_in_a_row_is_text(template, tmp_path):
  foreign.tokenizer('qwen2').save_pretrained(tmp_path)
  loaded = tokenizer_lib.load(str(tmp_path), template)
  chat = template.startswith('chat:')
  system = 'Mind <|system|>.' if chat else ''
  rows = [
    Row('3<|end|><|assistant|>7', '', '', system),
    Row('1 + 2', '', '', system and 'Add.'),
    Row('<|end|>', '', '', system),
  ]
  ids_N = tokenizer_lib.encode_prompts(loaded, rows)
  special = set(loaded.backend.convert_tokens_to_ids(foreign.SPECIAL))
  # Those of the template alone, whatever the row.
  assert [sum(i in special for i in ids) for ids in ids_N] == [5 if chat else 1] * 3
  whole = '<|system|>{1}<|end|><|user|>{0}<|end|><|assistant|>'
  whole = whole if chat else '{0}<|assistant|>'
  texts = [loaded.backend.decode(ids) for ids in ids_N]
  assert texts == [whole.format(row.problem, row.system) for row in rows]
  # So is one that a Unigram tokenizer would find in its vocabulary.
  tokenizer = tokenizer_lib.Tokenizer(byte_fallback(), (1,), '{problem}')
  (ids,) = tokenizer_lib.encode_prompts(tokenizer, rows_of('1</s>2'))
  assert 1 not in ids and tokenizer.backend.decode(ids) == '1</s>2'


def test_a_prompt_does_not_depend_on_the_day():
  dated = chat("{{ strftime_now('%d*%m*%Y') }}={{ messages[0].content }}")
  assert texts(dated, rows_of('1')) == ['26*07*2024=1']
  asking = (  # as in Llama 3.2
    '{%- if not date is defined %}{%- if strftime_now is defined %}'
    '{%- set date = strftime_now( "%d-%H" ) %}{%- endif %}{%- endif %}{{- date }}'
  )
  assert texts(chat(asking), rows_of('1')) == ['26-00']


def byte_fallback():
  """A tokenizer with a token for each byte, and the decoder of Llama 2."""
  scores = [('<unk>', 0.0), ('</s>', 0.0), *((x, -2.0) for x in ('▁', 'a', '▁1', '.'))]
  scores += [(f'<0x{i:02X}>', -9.0) for i in range(256)]
  backend = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, 0, True))
  parts = tokenizers.decoders
  steps = parts.Replace('▁', ' '), parts.ByteFallback(), parts.Fuse()
  backend.decoder = parts.Sequence([*steps, parts.Strip(' ', 1, 0)])
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token='</s>', unk_token='<unk>'
  )


def test_the_text_of_tokens_is_what_the_policy_wrote():
  backend = byte_fallback()
  backend.clean_up_tokenization_spaces = True
  loaded = tokenizer_lib.Tokenizer(backend, (), '{problem}')
  ids = [3, 4, 2, 5]
  assert backend.decode(ids) == 'a 1.', 'transformers would clean up'
  tokens_BT = np.asarray([ids])
  mask_BT = np.ones(tokens_BT.shape, bool)
  written = tokenizer_lib.decode_responses(loaded, tokens_BT, mask_BT)
  assert written == tokenizer_lib.decode_prompts(loaded, tokens_BT, [len(ids)])
  assert written == [''.join(tokenizer_lib.pieces(loaded, ids))] == ['a 1 .']


@pytest.mark.parametrize('kind', ['qwen2', 'llama', 'bytes'])
def test_pieces_are_the_text_whatever_the_tokens(kind):
  backend = byte_fallback() if kind == 'bytes' else foreign.tokenizer(kind)
  tokenizer = tokenizer_lib.Tokenizer(backend, (), '{problem}')
  rng = np.random.default_rng(0)
  for _ in range(200):  # mostly bytes that are no text
    ids = rng.integers(len(backend), size=rng.integers(1, 20)).tolist()
    whole = backend.decode(ids, clean_up_tokenization_spaces=False)
    found = tokenizer_lib.pieces(tokenizer, ids)
    assert ''.join(found) == whole and len(found) == len(ids)
  if kind == 'llama':
    return
  # Text with characters of several tokens: each piece ends where its characters do.
  text = 'a€ 1 é. 漢字 ? 😀 a'
  ids = backend(text, add_special_tokens=False)['input_ids']
  found = tokenizer_lib.pieces(tokenizer, ids)
  assert ''.join(found) == backend.decode(ids) and len(found) == len(ids)
  assert max(map(len, found)) <= 2


# ChatML, with a system message of the model if none is given.
CHATML = (
  "{% if messages[0].role != 'system' %}(0)\n{% endif %}"
  '{% for m in messages %}({{ m.role|length }}){{ m.content }}\n{% endfor %}'
  '{% if add_generation_prompt %}(9){% endif %}'
)


@pytest.mark.parametrize('system', ['', '33'])
def test_earlier_turns_are_rendered_as_transformers_renders_them(system):
  tokenizer = chat(CHATML, 'chat:{problem}')
  history = ('user', '1+1'), ('assistant', ' 2'), ('tool', '7'), ('assistant', '8')
  row = Row('2+2', '', '', system, history=history)
  turns = [('system', system)] * bool(system) + [*history, ('user', '2+2')]
  ids = tokenizer.backend.apply_chat_template(
    [{'role': role, 'content': text} for role, text in turns],
    add_generation_prompt=True,
    return_dict=False,
  )
  assert tokenizer_lib.encode_prompts(tokenizer, [row]) == [ids]


@pytest.mark.parametrize(
  ('row', 'plain', 'chat'),
  [
    (
      Row('2+2', '', history=(('user', '1+1'), ('assistant', '2'))),
      r"earlier turns of a conversation, such as '1\+",
      r"leaves out the user message '1\+",
    ),
    (
      Row('1+2', '', '', 'Be brief.'),
      "no place for the system message 'Be brief",
      "leaves out the system message 'Be brief",
    ),
  ],
)
def test_a_message_without_a_place_is_refused(row, plain, chat):
  # The embedded chat template writes the last message only.
  for template, words in (('{problem}\n', plain), ('chat:{problem}', chat)):
    tokenizer = TOKENIZER._replace(template=template)
    with pytest.raises(ValueError, match=words):
      tokenizer_lib.encode_prompts(tokenizer, [*rows_of('1+1'), row])


# As Gemma 3's, with {1} for its tokens; Gemma 2's refuses a system message.
GEMMA_3 = (
  "{% set head = '' %}"
  "{% if messages[0].role == 'system' %}"
  "{% set head = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}"
  '{% endif %}'
  '{% for m in messages %}'
  "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
  "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
  '({{ m.role|length }}){{ head if loop.first }}{{ m.content | trim }}<eos>\n'
  '{% endfor %}'
  '{% if add_generation_prompt %}(9){% endif %}'
)
GEMMA_2 = (
  "{% if messages[0].role == 'system' %}"
  "{{ raise_exception('System role not supported') }}{% endif %}" + GEMMA_3
)


@pytest.mark.parametrize('template', [GEMMA_3, GEMMA_2], ids=['has', 'refuses'])
def test_a_system_text_without_a_role_is_put_before_the_first_user(template):
  history = ('user', '1+1'), ('assistant', '2')
  rows = [Row('3+4', '', '', '33'), Row('2+2', '', '', '44', history=history)]
  assert texts(chat(template), [*rows, *rows_of('5')]) == [
    '(4)33\n\n3+4<eos>\n(9)',
    '(4)44\n\n1+1<eos>\n(9)2<eos>\n(4)2+2<eos>\n(9)',
    '(4)5<eos>\n(9)',
  ]
  (text,) = tokenizer_lib.render(
    chat(template).backend,
    [[{'role': 'system', 'content': '3'}, {'role': 'user', 'content': '4'}]],
    answered=True,
  )
  assert text == '(4)3\n\n4<eos>\n'


def test_a_picture_follows_a_system_text_without_a_role():
  parts = [{'type': 'image'}, {'type': 'text', 'text': '5'}]
  turns = [{'role': 'system', 'content': '3'}, {'role': 'user', 'content': parts}]
  template = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{% for p in messages[0].content %}{{ p.text or '<image>' }}{% endfor %}"
  )
  rendered = tokenizer_lib.render(chat(template).backend, [turns], answered=False)
  assert rendered == ['3\n\n<image>5']


def test_a_system_text_without_a_user_is_the_templates_affair():
  turns = [{'role': 'system', 'content': '3'}, {'role': 'assistant', 'content': '4'}]
  render = tokenizer_lib.render
  assert '3' in render(chat(CHATML).backend, [turns], answered=True)[0]
  refused = chat(GEMMA_2).backend
  said = sentence_of(functools.partial(render, answered=True), refused, [turns])
  assert 'System role not supported' in said


def test_a_failure_of_another_kind_is_still_named():
  row = Row('1', '', '', '33', history=(('user', '1'), ('user', '2')))
  said = sentence_of(tokenizer_lib.encode_prompts, chat(GEMMA_2), [row])
  assert 'must alternate' in said


def test_of_two_ends_the_one_of_a_turn_ends_given_responses(tmp_path):
  """As in Gemma 3: <eos> ends a text, <end_of_turn> a turn of a chat."""
  backend = foreign.tokenizer('qwen2', end='<|user|>')
  backend.save_pretrained(tmp_path)
  text, turn = backend.convert_tokens_to_ids(['<|user|>', '<|end|>'])
  ends = {'eos_token_id': [text, turn]}
  (tmp_path / 'generation_config.json').write_text(json.dumps(ends))
  plain = tokenizer_lib.load(str(tmp_path), '{problem}')
  assert plain.eos == (text, turn)
  in_chat = tokenizer_lib.load(str(tmp_path), 'chat:{problem}')
  assert in_chat.eos == (turn, text)
  for tokenizer in (plain, in_chat):
    given = given_lib.encode(tokenizer, Between(), '12')
    assert given.tokens[-1] == tokenizer.eos[0] and not {*given.tokens[:-1]} & {
      *tokenizer.eos
    }
    # Both end a response that was sampled, and neither is a part of its text.
    digits = given.tokens[:-1]
    rows = np.asarray([[*digits, text], [*digits, turn]])
    mask = np.ones(rows.shape, bool)
    assert tokenizer_lib.decode_responses(tokenizer, rows, mask) == ['12', '12']
    assert tokenizer_lib.ends(tokenizer, rows[0]) == tokenizer_lib.ends(
      tokenizer, rows[1]
    )
    has_ended = ended(mask[None], np.isin(rows, tokenizer.eos)[None], None)
    assert has_ended.all()


@pytest.mark.parametrize(
  ('template', 'reason'),
  [
    ('{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}', 'RecursionError'),
    ("{{ raise_exception('no users') }}", 'TemplateError: no users'),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", 'SecurityError'),
  ],
)
def test_a_chat_template_that_fails_says_why(template, reason):
  said = sentence_of(tokenizer_lib.encode_prompts, chat(template), rows_of('1'))
  assert 'tokenizer.template' in said and reason in said


@pytest.mark.parametrize(
  ('template', 'expected'),
  [
    ('{% for m in messages %}{{ m.content }}<eos>{% endfor %}', ('<eos>', True)),
    ('{% for m in messages %}{{ m.content }}<pad>{% endfor %}', ('<pad>', False)),
    ('<eos>', None),
    (None, None),
  ],
)
def test_the_token_after_an_answer_is_found(template, expected):
  assert tokenizer_lib.turn_end(chat(template)) == expected
