"""Every knob of a run, in the order of the flow; sections are named after modules.

Other configs start from this one. The keys of a section are keywords of the functions
in that module; a slot's rules keep their knobs under their own names, so that choosing
another rule is one word: --config.clip.rule=fixed.
"""

from math import inf

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """The embedded default: about eight minutes on two CPU cores."""
  config = ConfigDict()
  config.title = 'search, tiny'
  config.protocol = 'about 6 minutes on two CPU cores'  # shown on the first screen
  config.seed = 0
  config.steps = 80  # learner steps: rollout batches
  config.responses = inf  # sampled in training; the run ends once it has so many
  config.cells = ()  # of a grid, each (name, batch rule, clip rule); (): a single run

  config.mesh = dict(data=-1, fsdp=1, tensor=1)
  config.model = dict(
    path='',  # a Hugging Face directory; empty: random weights, then the warm start
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=16,
    ffn=192,
    rope_theta=10_000.0,
    dtype='float32',  # of the parameters; bfloat16: the optimiser keeps a float32 copy
    compute='float32',  # of the matrix products
    attention='auto',  # or plain, cudnn, splash
    remat='full',  # what the backward pass computes again: full, dots, none
  )
  config.logprob = dict(chunk=256)
  config.text = dict(tokenizer='characters', template='{problem}\n')
  config.problems = dict(
    # synthetic, countdown, a.jsonl, a.jsonl,b.parquet, hub:owner/name:split, tfds:name
    source='synthetic',
    test_source='synthetic',
    family='search',
    level=3,
    seed=0,
    train=2048,
    test=512,
    # wording: 'short' is what the embedded policy can read
    countdown=dict(numbers=(3, 4), largest=99, target=999, wording='sentence'),
    duplicates='drop',  # or 'keep'; told either way
    overlap='keep',  # held-out problems among the training problems; or 'drop' them
    changed='refuse',  # or 'accept': resume with other problems, on empty shelves
  )
  # overlong: training prompts above `width` tokens are dropped and counted, or 'refuse'
  config.prompts = dict(count=64, width=17, overlong='drop')
  config.sampler = dict(
    group=8,
    new=40,
    temperature=1.0,
    slots=512,
    refill=512,
    chunk=10,
    segments=1,  # of the cache; those that no slot has reached are not read
    late=0,  # dispatches; 1 keeps an accelerator busy while the host looks
  )
  config.rewards = dict(
    rule='aime',  # or math, gsm8k, countdown, exact
    workers=2,  # processes; used where the rule may hang: math
    deadline=3.0,  # seconds an answer may take
    batch_deadline=300.0,  # seconds all answers of a rollout may take
    memory_mb=2048,  # of a worker
    recycle=1000,  # answers after which a worker is replaced
    shaping=dict(
      format_bonus=0.0,
      overlong_penalty=0.0,  # 1.0: DAPO's soft overlong punishment
      overlong_cache=1,  # tokens before sampler.new over which it grows
      truncated='judged',  # or 'wrong', 'masked'
    ),
  )
  config.rollout = dict(
    refresh_every=1,  # learner steps between copies to the actor
    max_age=0,  # learner steps that a response may be in flight; 0: all are finished
    budget=inf,  # tokens a slot that a learner step may spend, where max_age allows
    cache='refresh',  # of responses in flight under new weights; or 'keep'
  )
  config.buffer = dict(
    capacity=256,  # groups on each shelf
    max_age=3,  # learner steps after which a good group is not learned from
    max_reuse=3,  # times that it is
    recheck=16,  # hard problems that are asked again
    every=2,  # learner steps between rechecks
    band=dict(  # what is hard (up to c1) and good (c2 to c3), shares of right answers
      rule='fixed',
      fixed=dict(hard=1 / 8, good=(1 / 8, 5 / 8)),
      moving=dict(hard=(1 / 8, 3 / 8), low=(1 / 8, 3 / 8), high=(5 / 8, 7 / 8)),
      threshold_free={},
      everything={},
    ),
  )
  config.batch = dict(
    rule='fresh_only',
    refills=2,  # rounds of prompts more that learnable_only may ask in a step
    weights=dict(fresh=1.0, rechecked=1.0, reused=1.0),  # of a row, by its source
    fresh_only={},
    learnable_only={},
    replay=dict(older=1),  # replayed groups a fresh one
    adapted={},
  )
  config.advantage = dict(
    rule='group_relative',
    group_relative=dict(eps=1e-6),
    leave_one_out={},
    group_centred={},
  )
  config.clip = dict(
    rule='balanced',
    unclipped={},
    fixed=dict(low=0.8, high=1.2, dual=inf),
    balanced=dict(
      target=0.42,
      low=(0.6, 0.9),
      high=(1.2, 3.0),
      low_step=0.02,
      high_step=0.05,
      contribution='gradient',  # or 'surrogate'
      weight='one',  # or 'behaviour'
      order='upper',  # or 'lower'
      resolution='step',  # or 'continuous', to within `tolerance`
      tolerance=1e-4,
      sources=('fresh', 'rechecked', 'reused'),  # rows that are searched on
      reused_high=inf,  # the most the upper bound may be for reused rows
      dual=inf,  # dual clip; inf is none
    ),
    recipe=dict(
      positive_to_negative=0.5,
      low=(0.8, 0.95),
      high=(1.2, 2.0),
      low_step=0.05,
      high_step=0.1,
      dual=3.0,
    ),
  )
  config.loss = dict(
    rule='clipped',
    aggregate='token',  # or 'sequence', 'constant'
    kl=0.0,  # cost of a nat of divergence from the policy that wrote the batch
    clipped=dict(limit=inf),
    decoupled=dict(cap=2.0),
    sequence={},
    cispo={},
    tis=dict(cap=2.0),
  )
  config.learner = dict(
    epochs=1,
    minibatches=8,
    slices=1,
    give_up=64,  # updates in a row that are not finite, after which the run stops
    search='minibatch',  # or 'slice': no second forward pass, bounds of each slice
  )
  config.optimizer = dict(
    lr=3e-4, warmup=4, b1=0.9, b2=0.95, weight_decay=0.0, max_norm=1.0
  )
  config.warmstart = dict(
    clean=700, noisy=100, batch=96, lr=3e-3, slip=0.4, repeat=0.15
  )
  config.evaluate = dict(
    every=25,
    group=1,  # responses a problem
    k=(1,),  # of pass@k and maj@k
    sampling=dict(temperature=1.0, top_k=0, top_p=1.0),  # temperature 0: the likeliest
  )
  config.metrics = dict(tensorboard=True, wandb=False)
  # The newest `keep`, and the `best` ones by accuracy of the evaluated steps.
  config.checkpoint = dict(every=10, keep=2, best=1)
  return config
