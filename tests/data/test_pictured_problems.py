"""Problems with pictures as a run has them: pictures count in all that texts do."""

import json

import numpy as np
import pytest
from pictured import ONE_LAYER, READER, png

from bapo_jax.data import drawn, pictured_problems, pictures, prompts, sources
from bapo_jax.data.knobs import DrawnConfig, ProblemsConfig, PromptsConfig

V = ONE_LAYER
KNOBS = PromptsConfig(count=2, max_prompt_tokens=40)


def made(**knobs):
  found = {'source': 'drawn', 'test_source': 'drawn', 'train': 40, 'test': 8}
  return ProblemsConfig(**found | knobs)


def files(tmp_path, *rows, name='train.jsonl', **knobs):
  """Problems of a file whose rows are (problem, answer, seeds of its pictures)."""
  lines = []
  for problem, answer, *seeds in rows:
    for seed in seeds:
      (tmp_path / f'{seed}.png').write_bytes(png(56, 56, seed))
    names = [f'{seed}.png' for seed in seeds]
    lines.append({'problem': problem, 'answer': answer, 'images': names})
  path = tmp_path / name
  path.write_text('\n'.join(json.dumps(line) for line in lines))
  return made(**{'source': str(path), 'test_source': str(path)} | knobs)


def test_drawn_problems_are_split_and_tokenised():
  training, held_out = pictured_problems.load(READER, KNOBS, made(), V)
  all_drawn = drawn.generate(DrawnConfig(), 0, 48)
  assert training.text == [p.text for p in all_drawn[:40]]
  assert held_out.pictures == [(p.picture,) for p in all_drawn[40:]]
  assert held_out.answer == [str(p.answer) for p in all_drawn[40:]]
  assert training.grids == [((4, 4),)] * 40
  # Four merged patches, and 'x1+x2 mod 10' with its newline.
  assert set(training.length_N.tolist()) == {4 + 13}
  assert (training.tokens_NT[:, :4] == V.image_token).all()
  assert (training.tokens_NT[:, 4] != V.image_token).all()
  alone = pictured_problems.load_held_out(READER, KNOBS, made(), V)
  assert alone.pictures == held_out.pictures and alone.text == held_out.text


def test_blank_pictures_leave_out_no_problem(capsys):
  # Few texts and one background: blank problems look alike, and have other answers.
  for kind in ('bars', 'blank'):
    problems = made(train=500, test=300, drawn={'kind': kind})
    training, held_out = pictured_problems.load(READER, KNOBS, problems, V)
    assert (len(training.text), len(held_out.text)) == (500, 300)
  assert training.answer != held_out.answer
  assert capsys.readouterr().out == ''


def test_the_same_text_with_another_picture_is_another_problem(tmp_path, capsys):
  same = ('<image>1', '3')
  problems = files(tmp_path, (*same, 0), (*same, 1), (*same, 0), ('2', '4'))
  found, _ = pictured_problems.load(READER, KNOBS, problems, V)
  assert found.text == ['<image>1', '<image>1', '2']
  assert found.pictures == [(png(56, 56, 0),), (png(56, 56, 1),), ()]
  assert (
    '4 rows hold 3 different problems; the first of each' in capsys.readouterr().out
  )
  repeated = problems.model_copy(update={'duplicates': 'keep'})
  assert len(pictured_problems.load(READER, KNOBS, repeated, V)[0].text) == 4


def test_problems_of_both_sets_are_found_by_their_pictures(tmp_path, capsys):
  train = files(tmp_path, ('<image>1', '3', 0), ('<image>1', '3', 1), ('2', '4'))
  test = files(tmp_path, ('<image>1', '3', 1), ('5', '4'), name='test.jsonl')
  problems = train.model_copy(update={'test_source': test.source, 'overlap': 'drop'})
  training, held_out = pictured_problems.load(READER, KNOBS, problems, V)
  assert training.pictures == [(png(56, 56, 0),), ()]
  assert len(held_out.text) == 2
  assert '1 of 2 held-out problems are training problems too' in capsys.readouterr().out


def test_a_prompt_that_its_picture_makes_too_long_is_left_out(tmp_path, capsys):
  problems = files(tmp_path, ('<image>1', '3', 0), ('2', '4'), ('3', '4'))
  few = PromptsConfig(count=2, max_prompt_tokens=5)
  with pytest.raises(ValueError, match='has 6 tokens'):  # of the held-out ones
    pictured_problems.load(READER, few, problems, V)
  assert 'max_prompt_tokens=5: 1 of 3 training prompts are longer, up to 6' in (
    capsys.readouterr().out
  )


def test_a_fingerprint_changes_with_a_picture():
  found, _ = pictured_problems.load(READER, KNOBS, made(), V)
  before = prompts.fingerprint(found)
  changed = [*found.pictures[:-1], (png(56, 56),)]
  assert prompts.fingerprint(found._replace(pictures=changed)) != before
  texts = found._replace(pictures=(), grids=())
  assert prompts.fingerprint(texts) != before
  # Without a picture a problem is what it is among texts.
  none = found._replace(pictures=[()] * len(found.text))
  assert prompts.fingerprint(none) == prompts.fingerprint(texts)


def test_prompts_are_dealt_as_those_of_texts():
  found, _ = pictured_problems.load(READER, KNOBS, made(), V)
  dealt = prompts.next_prompts(found, 0, 0, 4)
  np.testing.assert_array_equal(dealt.tokens_PT, found.tokens_NT[dealt.id_P])


def test_sources_without_pictures_are_rows_without(tmp_path):
  rows = sources.pictured_rows(
    made(source='synthetic', test_source='synthetic'), 'source'
  )
  assert len(rows) == 40 and all(row.pictures == () for row in rows)


def test_a_picture_is_decoded_once_however_often_it_is_read(tmp_path, monkeypatch):
  rows = [(f'<image>{i}', '3', i) for i in range(3)]
  problems = files(tmp_path, *rows, overlap='keep')
  pictures.checked.cache_clear()
  read, decoded = pictures.read, []
  monkeypatch.setattr(pictures, 'read', lambda data: decoded.append(data) or read(data))
  for _ in range(2):
    sources.missing(problems, 'source', pictured=True)
    pictured_problems.load(READER, KNOBS, problems, V)
  assert len(decoded) == len(set(decoded)) == 3
  # And held once.
  again = sources.pictured_rows(problems, 'source')
  assert all(any(a is b for b in decoded) for row in again for a in row.pictures)


def test_pictures_are_read_where_the_policy_sees(tmp_path):
  problems = files(tmp_path, ('<image>1', '3', 0))
  for each in (problems, made()):
    assert sources.missing(each, 'source', pictured=True) == []
    message = r'pictures, which the policy .* --config\.model\.tower\.layers=2'
    with pytest.raises(ValueError, match=message):
      sources.missing(each, 'source')
  (tmp_path / '0.png').write_bytes(b'broken')
  with pytest.raises(ValueError, match='picture 1: a file that begins with'):
    sources.missing(problems, 'source', pictured=True)


def test_the_warm_start_imitates_the_training_problems():
  problems, solve = sources.sft_problems(made())
  assert problems == drawn.generate(DrawnConfig(), 0, 48)[:40]
  assert solve is drawn.solve
  with pytest.raises(ValueError) as error:
    sources.sft_problems(made(drawn=DrawnConfig(wording='sentence')))
  assert str(error.value).startswith(
    "problems.drawn.wording='sentence' is not for the embedded policy"
  )
