// The page: knobs in, formulas, curves, planes and the recorded batch out.
//
// 1. `knobs` holds every setting; the address keeps those that differ from the defaults;
// 2. `buildControls` makes a slider or a choice of every knob of the chosen rules;
// 3. `draw` computes everything anew after each change.
'use strict';

const PAGE_KNOBS = {
  stale: { value: 1, slider: [0, 4, 0.05], meaning: 'Factor of the recorded log-ratios log r; 1: as recorded.' },
  moved: { value: 0, slider: [0, 1, 0.05], meaning: 'Share of the log-ratio that the policy had moved before the learner step: log(prox / mu) / log r.' },
  p: { value: 0.15, slider: [0.01, 1, 0.01], meaning: 'Probability of the token, at which the curves cut the planes.' },
  range: { value: 4, choices: [1.002, 1.02, 1.2, 2, 4, 8], meaning: 'The axis of ratios goes from 1 / range to range.' },
  right: { value: 2, slider: [0, 8, 1], meaning: 'Right responses in a group of eight.' },
};
const LABELS = { stale: 'staleness, × recorded log r', moved: 'moved before the step, share of log r', p: 'π(token)', range: 'range of ratios',
  right: 'right responses, of 8', 'loss.kl': 'cost, loss.kl', 'loss.kl_direction': 'direction' };
const MORE = ['limit', 'dual', 'order', 'contribution', 'weight', 'resolution', 'low_step', 'high_step'];
// With the default target of a run, the search does not move on the recorded batch.
const OPENING = { 'clip.balanced.target': 0.47 };

// Numbers are packed as base64 of float32, and infinity is the string 'inf'.
function revive(key, value) {
  if (value === 'inf') return Infinity;
  if (value === null || typeof value !== 'object' || !('float32' in value)) return value;
  const bytes = Uint8Array.from(atob(value.float32), (c) => c.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

const DATA = JSON.parse(byId('data').textContent, revive);
const KNOBS = { ...DATA.knobs, ...PAGE_KNOBS };
for (const [part, formulas] of Object.entries({ loss: LOSSES, clip: CLIPS, mask: MASKS })) {
  const knob = KNOBS[`${part}.rule`];
  knob.choices = knob.choices.filter((rule) => rule in formulas);
}
if (DATA.own) addOwnRule();
const DEFAULTS = Object.fromEntries(
  Object.entries(KNOBS).map(([name, knob]) => [name, knob.value]));
Object.assign(DEFAULTS, OPENING);
if (DATA.own) Object.assign(DEFAULTS, { [`${DATA.own.slot}.rule`]: 'own', ...DATA.own.beside });
const METHODS = DATA.own ? { [DATA.own.title]: {}, ...ownMethods() } : methods();
let knobs = { ...DEFAULTS };
let hovered = null; // ratio under the pointer
let ignored = []; // parts of the address that the page does not know

// 1. Settings

function addOwnRule() {
  const { slot, beside, title, axes, defaults } = DATA.own;
  DATA.bounds.own = beside['clip.rule'] === 'fixed' ? 'cut' : 'ignored';
  KNOBS[`${slot}.rule`].choices.push('own');
  for (const { name, values } of axes) {
    if (isOwnKnob(name)) {
      const least = Math.min(...values);
      const most = Math.max(...values);
      KNOBS[name] = { value: defaults[name], least, most,
        meaning: `${name.slice(9)} of ${title}.` };
    }
  }
}

// The published methods whose rules have a formula here.
function methods() {
  return Object.fromEntries(Object.entries(DATA.methods).filter(([, set]) =>
    Object.entries(set).every(([name, x]) => !name.endsWith('.rule') || KNOBS[name].choices.includes(x))));
}

// The methods of the paper's rules name both rules where the defaults are another's.
function ownMethods() {
  const both = { 'loss.rule': 'clipped', 'clip.rule': 'balanced' };
  return Object.fromEntries(
    Object.entries(methods()).map(([name, set]) => [name, { ...both, ...set }]));
}

function isOwnKnob(name) {
  return name.split('.')[1] === 'own';
}

const isMask = (name) => name.startsWith('mask.');

const same = (a, b) => String(a) === String(b);
const numeric = (text) => (text === 'inf' ? Infinity : text.trim() === '' ? NaN : Number(text));
const written = (value) => (value === Infinity ? 'inf' : String(value));

// A value of a knob from text, or null if the knob does not take it.
function parsed(name, text) {
  const knob = KNOBS[name];
  if (!knob) return null;
  if (knob.choices) return knob.choices.find((choice) => same(choice, text)) ?? null;
  const values = text.split(',').map(numeric);
  if (values.some(Number.isNaN)) return null;
  const wanted = Array.isArray(knob.value) ? 2 : 1;
  if (values.length !== wanted) return null;
  const inside = values.map((x) => within(name, x));
  if (knob.rising) inside.sort((a, b) => a - b);
  return wanted === 2 ? inside : inside[0];
}

// The nearest value that the knob takes.
function within(name, x) {
  const values = ownValues(name);
  if (values) return values[nearest(values, x)];
  const knob = KNOBS[name];
  if (x === Infinity && knob.infinite) return x;
  const [first, last, step] = knob.slider;
  const open = (limit, sign) => (limit === undefined ? undefined : limit + sign * step / 10);
  const least = knob.least ?? open(knob.above, 1) ?? first;
  const most = knob.most ?? open(knob.below, -1) ?? (knob.infinite ? 1e9 : last);
  return clamp(x, least, most);
}

function fromAddress() {
  const found = { ...DEFAULTS };
  ignored = [];
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    const value = parsed(name, text);
    if (value === null) ignored.push(unknown(name, text));
    else found[name] = value;
  }
  return found;
}

// Names a part of the address that is no setting, with what may have been meant.
function unknown(name, text) {
  const either = (values) => values.join(', ').replace(/, ([^,]*)$/, ' or $1');
  if (name in KNOBS) {
    const { choices, value } = KNOBS[name];
    return `${name}=${text} (choose ${choices ? either(choices)
      : Array.isArray(value) ? 'two numbers' : 'a number'})`;
  }
  const [part, knob] = [name.split('.')[0], name.split('.').pop()];
  const similar = Object.keys(KNOBS).filter(
    (x) => x.startsWith(`${part}.`) && x.endsWith(`.${knob}`));
  return similar.length ? `${name} (write ${either(similar)})` : name;
}

// Only what differs from the defaults, in the order of the knobs.
function changed() {
  return Object.keys(KNOBS).filter((name) => !same(knobs[name], DEFAULTS[name]));
}

function toAddress() {
  const text = changed().map((name) => `${name}=${[knobs[name]].flat().map(written)}`);
  history.replaceState(null, '', text.length ? `#${text.join('&')}` : location.pathname);
}

// Why a run refuses settings; '' if it does not.
function refusal(knobs) {
  if (isOwn(knobs)) {
    const other = Object.entries(DATA.own.beside).find(([name, value]) => knobs[name] !== value);
    return other ? `the table of your rule has ${other[0]}='${other[1]}' only; choose it` : '';
  }
  const names = ['loss.rule', 'clip.rule', 'loss.aggregate',
    'clip.balanced.contribution', 'clip.balanced.weight'];
  const index = DATA.refused[names.map((name) => knobs[name]).join('|')];
  if (index !== undefined) return DATA.sentences[index];
  const k = section(knobs, 'clip.balanced');
  if (knobs['clip.rule'] === 'balanced' && k.resolution === 'step') {
    for (const bound of ['low', 'high']) {
      const width = k[bound][1] - k[bound][0];
      const step = k[`${bound}_step`];
      if (!(step === 0 && width === 0) && !(step > 0 && step <= width + 1e-6)) {
        return `clip.${bound}_step=${step} must be above 0 and at most ${
          Number(width.toPrecision(6))}, the width of the range (${k[bound].join(', ')
        }); for a constant bound set both ends equal and the step to 0`;
      }
    }
  }
  return '';
}

// The first value of a knob with which a run accepts the other settings.
const fitting = (name) =>
  KNOBS[name].choices.find((x) => !refusal({ ...knobs, [name]: x }));

// Changes of the rules with which a run accepts the settings; each changes one knob,
// except for a rule of the user.
function offers() {
  if (isOwn(knobs)) {
    const wrong = Object.entries(DATA.own.beside).filter(([name, x]) => knobs[name] !== x);
    return [Object.fromEntries(wrong)];
  }
  const names = ['clip.rule', 'clip.balanced.contribution', 'clip.balanced.weight',
    'clip.balanced.resolution', 'loss.aggregate', 'loss.rule'];
  const values = names.map((name) => [name, fitting(name)]);
  return values.filter(([, x]) => x !== undefined).map(([name, x]) => ({ [name]: x }));
}

// Changes settings; a loss rule brings the first clip rule along that it goes with.
function set(values) {
  Object.assign(knobs, values);
  if (Object.values(values).includes('own')) Object.assign(knobs, DATA.own.beside);
  if ('loss.rule' in values && !('clip.rule' in values) && refusal(knobs)) {
    knobs['clip.rule'] = fitting('clip.rule') ?? knobs['clip.rule'];
  }
  ignored = [];
  toAddress();
  buildControls();
  draw();
}

// 2. Controls

const textOf = (id) => byId('formula-texts').content.getElementById(`formula-${id}`);
const sentenceOf = (id) => textOf(id)?.querySelector('p').textContent ?? '';

function choose(select, choices, value, then) {
  select.replaceChildren(...choices.map(([text, choice, title]) => {
    const option = new Option(text, String(choice), false, same(choice, value));
    option.title = title ?? '';
    return option;
  }));
  select.onchange = () => then(choices[select.selectedIndex][1]);
}

function buildChoices() {
  const method = Object.entries(METHODS).find(([, values]) => Object.keys(KNOBS).every(
    (name) => name in PAGE_KNOBS || same(knobs[name], values[name] ?? DEFAULTS[name])));
  const typed = (title) => (title in DATA.typed ? `${title}  :${DATA.typed[title]}` : title);
  const names = Object.keys(METHODS).map((title) => [typed(title), title]);
  const all = method ? names : [['your own setting', ''], ...names];
  choose(byId('method'), all, method ? method[0] : '', (name) => {
    if (name) set({ ...DEFAULTS, ...METHODS[name] });
  });
  for (const [id, slot] of [['loss', 'loss'], ['clip', 'clip'], ['mask', 'mask']]) {
    const choices = KNOBS[`${slot}.rule`].choices.map((rule) =>
      [rule === 'own' ? DATA.own.title : rule, rule, sentenceOf(`${slot}-${rule}`)]);
    choose(byId(id), choices, knobs[`${slot}.rule`], (rule) => set({ [`${slot}.rule`]: rule }));
  }
  const means = { token: 'tokens', sequence: 'responses', constant: 'responses, sums' };
  choose(byId('aggregate'), KNOBS['loss.aggregate'].choices.map((x) => [means[x] ?? x, x]),
    knobs['loss.aggregate'], (value) => set({ 'loss.aggregate': value }));
}

// The knobs that matter to the chosen rules.
function shownKnobs() {
  const [rule, bounds] = [knobs['loss.rule'], knobs['clip.rule']];
  const names = Object.keys(DATA.knobs).filter(
    (name) => !name.endsWith('.rule') && name !== 'loss.aggregate'
      && [`loss.${rule}.`, `clip.${bounds}.`, `mask.${knobs['mask.rule']}.`].some(
        (prefix) => name.startsWith(prefix)));
  if (isOwn(knobs)) {
    const axes = DATA.own.axes.map((axis) => axis.name);
    return [...axes, 'p', 'range'];
  }
  return [...names, 'stale', ...(rule === 'decoupled' ? ['moved'] : []), 'p', 'range'];
}

let built = '';

// Makes the controls if other knobs are shown than before, and shows their values.
function buildControls() {
  buildChoices();
  const names = shownKnobs();
  if (names.join() !== built) {
    built = names.join();
    const box = byId('sliders');
    box.replaceChildren();
    const isMore = (name) => MORE.includes(name.split('.')[2]) && !isOwnKnob(name) && !isMask(name);
    const groups = [['Rules', names.filter((n) => n in DATA.knobs || isOwnKnob(n))],
      ['Batch and axes', names.filter((n) => n in PAGE_KNOBS)]];
    for (const [title, inside] of groups) {
      if (!inside.length) continue;
      box.append(elementOf('h3', { textContent: title }));
      for (const name of inside.filter((n) => !isMore(n))) box.append(...controlsOf(name));
      const hidden = inside.filter(isMore);
      if (!hidden.length) continue;
      const more = elementOf('details');
      more.open = hidden.some((name) => !same(knobs[name], DEFAULTS[name]));
      more.append(elementOf('summary', { textContent: 'more knobs' }));
      for (const name of hidden) more.append(...controlsOf(name));
      box.append(more);
    }
  }
  for (const control of document.querySelectorAll('[data-knob]')) show(control);
}

function controlsOf(name) {
  if (!Array.isArray(KNOBS[name].value)) return [controlOf(name)];
  return [controlOf(name, 0), controlOf(name, 1)];
}

// The slider's positions: values of the table, or [first, last, step].
function positionsOf(name) {
  const values = ownValues(name);
  if (values) return { first: 0, last: values.length - 1, step: 1, values };
  const [first, last, step] = KNOBS[name].slider;
  return { first, last: KNOBS[name].infinite ? last + step : last, step };
}

function controlOf(name, end) {
  const knob = KNOBS[name];
  const box = elementOf('div', { className: 'knob', title: knob.meaning.replaceAll('`', '') });
  box.dataset.knob = name;
  const ends = knob.rising ? [', first', ', last'] : [', a', ', b'];
  const suffix = end === undefined ? '' : ends[end];
  const label = (isMask(name) ? 'mask: ' : '') + (LABELS[name] ?? name.split('.').pop()) + suffix;
  const head = elementOf('div', { className: 'head' });
  head.append(elementOf('span', { textContent: label }));
  box.append(head);
  if (knob.choices) {
    const select = elementOf('select');
    select.ariaLabel = label;
    choose(select, knob.choices.map((x) => [String(x), x]), knobs[name], (x) => set({ [name]: x }));
    box.append(select);
    return box;
  }
  const number = elementOf('input', { type: 'text', inputMode: 'decimal', ariaLabel: `${label}, number` });
  const { first, last, step, values } = positionsOf(name);
  const slider = elementOf('input', { type: 'range', min: first, max: last, step, ariaLabel: label });
  const change = (value) => {
    if (Number.isNaN(value)) return show(box);
    const all = end === undefined ? within(name, value) : [...knobs[name]];
    if (end !== undefined) all[end] = within(name, value);
    if (knob.rising) {
      all[1 - end] = end ? Math.min(all[0], all[1]) : Math.max(all[0], all[1]);
    }
    return set({ [name]: all });
  };
  slider.oninput = () => {
    const x = Number(slider.value);
    if (values) return change(values[x]);
    return change(knob.infinite && x > last - step / 2 ? Infinity : x);
  };
  number.onchange = () => change(numeric(number.value));
  head.append(number);
  box.append(slider);
  if (end !== undefined) box.dataset.end = end;
  return box;
}

// Shows the value of a knob in its control.
function show(box) {
  const { knob: name, end } = box.dataset;
  const value = end === undefined ? knobs[name] : knobs[name][end];
  const select = box.querySelector('select');
  if (select) {
    select.value = String(value);
    return;
  }
  const [number, slider] = ['text', 'range'].map((t) => box.querySelector(`[type=${t}]`));
  const { last, values } = positionsOf(name);
  if (document.activeElement !== number || numeric(number.value) !== value) {
    number.value = written(Number.isFinite(value) ? Number(value.toPrecision(6)) : value);
  }
  slider.value = values ? nearest(values, value) : value === Infinity ? last : value;
}

// 3. Drawing

const fmt = (x) => (x === Infinity ? '∞' : x === 0 ? '0'
  : Math.abs(x) >= 100 ? x.toFixed(0) : Number(x.toPrecision(3)).toString());
const fine = (x) => (x === Infinity ? '∞' : String(Number(x.toPrecision(5))));
const signed = (x) => `${x > 0 ? '+' : x < 0 ? '−' : ''}${fmt(Math.abs(x))}`;
const percent = (x) => `${(100 * x).toFixed(1)} %`;

function showFormulas() {
  const [rule, bounds] = [knobs['loss.rule'], knobs['clip.rule']];
  const surrogate = bounds === 'balanced' && knobs['clip.balanced.contribution'] === 'surrogate';
  const mask = knobs['mask.rule'];
  const ids = [`loss-${rule}`, `clip-${surrogate ? 'surrogate' : bounds}`, `mask-${mask}`];
  const shown = ids.filter(textOf);
  byId('formulas').replaceChildren(...shown.map((id) => {
    const box = elementOf('div');
    box.append(...formulaOf(id));
    return box;
  }));
  byId('about').replaceChildren(...shown.map((id) => {
    const paragraph = textOf(id).querySelector('p').cloneNode(true);
    const [slot] = id.split('-');
    const textContent = `${slot[0].toUpperCase()}${slot.slice(1)} rule ${knobs[`${slot}.rule`]}. `;
    paragraph.prepend(elementOf('b', { textContent }));
    return paragraph;
  }));
  if (isOwn(knobs)) byId('about').prepend(docstring());
  byId('command').replaceChildren(...commandOf().map(
    (textContent) => elementOf('span', { textContent })));
}

const formulaOf = (id) =>
  [...textOf(id).querySelectorAll('math')].map((x) => x.cloneNode(true));

// What the author of a rule says about it.
function docstring() {
  const { title, about } = DATA.own;
  const paragraph = elementOf('p', { className: 'docstring' });
  paragraph.append(elementOf('b', { textContent: `${title}. ` }),
    about || 'This rule has no docstring.');
  return paragraph;
}

// The settings as overrides of a run.
function commandOf() {
  const [rule, bounds] = [knobs['loss.rule'], knobs['clip.rule']];
  const active = new Set([...shownKnobs(), 'loss.rule', 'clip.rule', 'loss.aggregate']);
  if (knobs['mask.rule'] !== 'none') active.add('mask.rule');
  if (knobs['loss.kl']) active.add('loss.kl').add('loss.kl_direction');
  const parts = Object.keys(KNOBS).filter((name) => active.has(name) && !(name in PAGE_KNOBS)
    && (name.endsWith('.rule') || !same(knobs[name], KNOBS[name].value)));
  return parts.map((name) => {
    const value = knobs[name];
    if (value === 'own') return `--config.${name}=${DATA.own.title}`;
    const text = Array.isArray(value) ? `"(${value.join(',')})"` : written(value);
    const [part, ...inner] = name.split('.'); // without the rule
    return `--config.${part}.${inner.at(-1)}=${text}`;
  });
}

// Whether no two bounds hold for all tokens.
const ignoresBounds = () => DATA.bounds[knobs['loss.rule']] === 'ignored'
  || knobs['clip.rule'] === 'dcpo'
  || (knobs['clip.rule'] === 'own' && !DATA.own.bounds);

// Where a bound is crossed, as a ratio pi / mu.
function crossing(bound) {
  if (knobs['loss.rule'] !== 'decoupled') return bound;
  return bound ** (1 / (1 - knobs.moved));
}

// Ratios to evaluate: a grid, and both sides of every jump.
function ratiosOf(range, bounds, grid) {
  if (inTable(knobs)) return grid.filter((r) => r >= 1 / range && r <= range);
  const ratios = Array.from({ length: 321 }, (_, i) => range ** (i / 160 - 1));
  for (const bound of [bounds.low, bounds.high, bounds.dual].map(crossing)) {
    if (bound > 1 / range && bound < range) ratios.push(bound * (1 - 1e-9), bound * (1 + 1e-9));
  }
  return ratios.sort((a, b) => a - b);
}

// Bounds to draw as upright lines.
function marks(frame, bounds) {
  if (ignoresBounds()) return '';
  const upright = (bound, name) => {
    const r = crossing(bound);
    if (!(r > frame.x[0] && r < frame.x[1])) return '';
    return line(frame.toX(r), frame.top, frame.toX(r), frame.bottom, name);
  };
  let text = '';
  for (const key of ['low', 'high', 'dual']) {
    const start = bounds.start[key];
    if (start !== undefined && start !== bounds[key]) text += upright(start, 'start');
    text += upright(bounds[key], 'bound');
  }
  return text;
}

// Curves of column `which` of [gain, weight] over the ratio, for both signs.
function drawCurves(svg, which, bounds, at) {
  const { range, p } = knobs;
  const ratios = ratiosOf(range, bounds, DATA.own?.ratios);
  const lines = [1, -1].map((adv) => ratios.map((r) => [r, at(r, p, adv)[which]]));
  const values = lines.flat().map(([, y]) => y).filter(Number.isFinite);
  const extreme = Math.min(10, Math.max(0.1, ...values.map(Math.abs)));
  const ends = [-1, 1].map((sign) => sign * 1.08 * extreme);
  drawLines(svg, range, ends, [[lines[1], 'minus'], [lines[0], 'plus']], (frame) => {
    if (p <= 1 / range) return marks(frame, bounds);
    const wide = Math.max(0, Math.min(frame.toX(p), frame.right) - frame.left);
    return `<rect class="impossible" x="${frame.left}" y="${frame.top}" width="${wide}" height="${frame.bottom - frame.top}"/>`
      + marks(frame, bounds);
  });
}

// Lines [points, class] over the ratio, with `behind(frame)` under them.
function drawLines(svg, range, ends, lines, behind = () => '') {
  const frame = frameOf(svg, [1 / range, range], ends, { logX: true });
  let text = axes(frame, ratioTicks(range), ticksOf(ends, 5), 'ratio r = π / μ');
  text += behind(frame);
  for (const [points, name] of lines) text += curve(frame, points, name);
  if (hovered !== null && hovered >= 1 / range && hovered <= range) {
    const x = frame.toX(hovered);
    text += line(x, frame.top, x, frame.bottom, 'hover');
  }
  svg.innerHTML = text;
  svg.frame = frame;
}

// The penalty in all directions, at the cost of the knob; nothing if that is 0.
function drawPenalty() {
  const [cost, chosen] = [knobs['loss.kl'], knobs['loss.kl_direction']];
  const scaled = (name, r) => PENALTIES[name](Math.log(r)).map((x) => cost * x);
  const names = Object.keys(PENALTIES);
  byId('penalty').classList.toggle('free', !cost);
  byId('cost').textContent = cost ? `These curves are for loss.kl=${cost}.`
    : 'The cost is 0, so there is no penalty; raise it to see the curves of each direction.';
  if (!cost) return;
  byId('penalty').querySelectorAll('svg.chart').forEach((svg, i) => {
    const range = Math.max(2, knobs.range);
    const ratios = Array.from({ length: 161 }, (_, j) => range ** (j / 80 - 1));
    const which = 1 - i; // the weight is drawn first
    const lines = names.map((name) => ratios.map((r) => [r, scaled(name, r)[which]]));
    const values = lines.flat().map(([, y]) => y);
    const ends = [Math.max(-10, Math.min(-0.1, ...values)), Math.min(10, Math.max(0.1, ...values))];
    const classes = names.map((name) => `direction ${name}${name === chosen ? ' chosen' : ''}`);
    drawLines(svg, range, ends.map((x) => 1.08 * x), lines.map((points, j) => [points, classes[j]]));
  });
  byId('directions').replaceChildren(...names.map((name) => {
    const [gain, weight] = scaled(name, hovered ?? 2);
    const box = elementOf('div', { className: 'rule' });
    const head = elementOf('div', { className: 'head' });
    head.innerHTML = `<svg width="26" height="14"><line x2="26" y1="7" y2="7" class="direction ${name}${name === chosen ? ' chosen' : ''}"/></svg>`;
    head.append(...formulaOf(`kl-${name}`), elementOf('i', {
      textContent: `at r = ${fine(hovered ?? 2)}: weight ${fmt(weight)}, gain ${fmt(gain)}` }));
    box.append(head, textOf(`kl-${name}`).querySelector('p').cloneNode(true));
    return box;
  }));
}

// The advantages of a group of eight under each rule.
function drawAdvantages() {
  const { right } = knobs;
  const rewards = Array.from({ length: 8 }, (_, i) => Number(i < right));
  byId('advantage-note').textContent = right % 8 ? ''
    : 'All rewards are equal: no response of this group has an advantage.';
  byId('advantages').replaceChildren(...Object.entries(ADVANTAGES).map(([name, rule]) => {
    const advantages = rule(rewards);
    const sides = [['right', right > 0, advantages[0]], ['wrong', right < 8, advantages[7]]];
    const box = elementOf('div', { className: 'rule' });
    const text = elementOf('div');
    const head = elementOf('div', { className: 'head' });
    head.append(elementOf('b', { textContent: name }), ...formulaOf(`advantage-${name}`));
    text.append(head, textOf(`advantage-${name}`).querySelector('p').cloneNode(true));
    const bars = elementOf('div', { className: 'sides' });
    bars.innerHTML = sides.map(([label, exists, x]) => {
      const wide = 50 * Math.abs(x) / Math.sqrt(7); // the largest: one right of eight
      const bar = `<div class="${x > 0 ? 'p' : 'm'}" style="width:${wide}%;left:${x > 0 ? 50 : 50 - wide}%"></div>`;
      return `<span>${label}</span><span class="number">${exists ? signed(x) : 'none'}</span><div class="track">${exists ? bar : ''}</div>`;
    }).join('');
    box.append(text, bars);
    return box;
  }));
}

// The weight over (r, p) as colour, and the recorded tokens of one sign on it.
function drawPlane(card, adv, bounds, at, applied) {
  const [svg, canvas] = [card.querySelector('svg'), card.querySelector('canvas')];
  const { range, p } = knobs;
  const frame = frameOf(svg, [1 / range, range], [0, 1], { logX: true });
  const most = Math.max(1, Math.min(range, 4));
  const value = (r, probability) =>
    (probability > r ? NaN : Math.abs(at(r, probability, adv)[1]) / most);
  const colours = ['--card', adv > 0 ? '--plus' : '--minus', '--impossible'];
  const context = heat(canvas, frame, value, colours);
  const [live, cut] = [[], []];
  applied.tokens.forEach((t, i) => {
    if (Math.sign(t.adv) !== adv) return;
    (applied.weights[i] === 0 ? cut : live).push([Math.exp(t.logR), Math.exp(t.logp)]);
  });
  context.globalAlpha = 0.45;
  dots(context, frame, live, 1.6, colourOf('--ink'), null);
  context.globalAlpha = 1;
  dots(context, frame, cut, 3, colourOf('--cut'), colourOf('--card'));
  let text = axes(frame, ratioTicks(range), [], 'ratio r = π / μ');
  for (const y of [0, 0.25, 0.5, 0.75, 1]) text += words(frame.left - 6, frame.toY(y) + 4, y, 'end');
  text += marks(frame, bounds);
  text += line(frame.left, frame.toY(p), frame.right, frame.toY(p), 'slice');
  text += words(frame.left + 4, frame.top + 12, 'π(token)', 'start', 'label');
  if (hovered !== null && hovered >= 1 / range && hovered <= range) {
    text += line(frame.toX(hovered), frame.top, frame.toX(hovered), frame.bottom, 'hover');
  }
  svg.innerHTML = text;
  svg.frame = frame;
  const note = `${live.length + cut.length} recorded tokens, <b class="cut-text">${cut.length} cut</b>`;
  card.querySelector('h2').innerHTML = `Weight where A ${adv > 0 ? '&gt;' : '&lt;'} 0 <span class="note">· ${note}</span>`;
}

function drawBatch({ bounds, before, after, tokens }) {
  const { name, length } = DATA.batch;
  byId('batch-name').textContent = `${length.length} responses, ${tokens.length} tokens of ${name}`
    + (knobs['loss.rule'] === 'own' || knobs.stale === 1 ? '' : `; log-ratios times ${fmt(knobs.stale)}`);
  const searches = bounds.met !== undefined;
  const bar = (label, { share, positive, negative }) => {
    const none = positive + negative === 0;
    const mark = searches && knobs['clip.rule'] === 'balanced'
      ? `<div class="mark" style="left:${100 * bounds.target}%" title="target"></div>` : '';
    return `<div class="bar"><span>${label}</span><div class="track">${none ? '' : `<div class="p" style="width:${100 * share}%">A &gt; 0: ${percent(share)}</div><div class="m">A &lt; 0&lrm;</div>`}${mark}</div></div>`;
  };
  byId('shares').innerHTML = bounds.index > 0
    ? bar('at start', before) + bar('searched', after) : bar('share', after);
  const cells = [];
  if (!ignoresBounds()) cells.push(['bounds', `${fine(bounds.low)} … ${fine(bounds.high)}`]);
  if (searches) {
    cells.push(['target', `${fine(bounds.target)} ${!bounds.evidence ? '(no evidence)' : bounds.met ? 'met' : 'out of reach'}`]);
  }
  if (bounds.index !== undefined) cells.push(['search steps', String(bounds.index)]);
  cells.push(['cut, A > 0', `${after.cutPlus} of ${after.plus}`], ['cut, A < 0', `${after.cutMinus} of ${after.minus}`]);
  byId('found').innerHTML = cells.map(([k, v]) => `<span><i>${k.replace('<', '&lt;')}</i> ${v}</span>`).join('');
  byId('path').hidden = !searches;
  const idle = knobs['clip.rule'] === 'balanced' && bounds.met && bounds.index === 0;
  byId('hint').hidden = !idle;
  const usual = KNOBS['clip.balanced.target'].value;
  const wouldRest = knobs['clip.rule'] === 'balanced' && bounds.target > usual && bounds.share(0) >= usual;
  byId('target-note').textContent = wouldRest
    ? `The share at the start bounds exceeds ${usual}, the default target of a run, with which the bounds would not move on this batch.` : '';
  byId('hint').querySelector('button').onclick = () =>
    set({ 'clip.balanced.target': Number((bounds.share(0) + 0.008).toFixed(3)) });
  if (searches) drawPath(bounds);
}

// The share that the search reads along its path, at most 200 points of it.
function drawPath(bounds) {
  const svg = byId('path').querySelector('svg');
  const every = Math.max(1, Math.floor(bounds.last / 200));
  const indices = [];
  for (let i = 0; i < bounds.last; i += every) indices.push(i);
  const points = [...indices, bounds.last].map((i) => [i, bounds.share(i)]);
  const shares = [...points.map(([, share]) => share), bounds.target];
  const pad = Math.max(0.01, 0.15 * (Math.max(...shares) - Math.min(...shares)));
  const ends = [Math.max(0, Math.min(...shares) - pad), Math.min(1, Math.max(...shares) + pad)];
  const frame = frameOf(svg, [0, Math.max(1, bounds.last)], ends);
  const ticks = ticksOf([0, Math.max(1, bounds.last)], 6).map((x) => [x, String(x)]);
  let text = axes(frame, ticks, ticksOf(ends, 4), 'step of the search');
  const turn = frame.toX(bounds.turn);
  text += line(turn, frame.top, turn, frame.bottom, 'bound');
  const y = frame.toY(bounds.target);
  text += line(frame.left, y, frame.right, y, 'target');
  text += words(frame.left + 4, y - 5, 'target', 'start', 'cut-label');
  text += curve(frame, points, 'share');
  text += `<circle class="dot" r="5" cx="${frame.toX(bounds.index)}" cy="${frame.toY(bounds.share(bounds.index))}"/>`;
  svg.innerHTML = text;
}

function drawReadout(at) {
  const { p } = knobs;
  const r = hovered ?? 1;
  const cell = (adv) => {
    const [gain, weight] = at(r, p, adv);
    return `<span><b class="${adv > 0 ? 'p' : 'm'}">A = ${adv > 0 ? '+1' : '−1'}</b> weight ${fmt(weight)}, gain ${fmt(gain)}</span>`;
  };
  const mu = p / r;
  byId('readout').innerHTML = `<span>r = <b>${fine(r)}</b></span><span>π = ${fine(p)}, μ = ${mu > 1 ? 'above 1' : fmt(mu)}</span>${cell(1)}${cell(-1)}`;
}

let current = null;

function showUnknown() {
  byId('unknown').hidden = !ignored.length;
  byId('unknown').textContent = `Unknown in the address, and ignored: ${ignored.join('; ')}.`;
}

// Shows why a run refuses these settings, and a button per change that helps.
function showRefusal(sentence) {
  byId('refusal').hidden = !sentence;
  byId('refusal').querySelector('p').textContent = sentence;
  byId('refusal').querySelector('.offers').replaceChildren(
    ...(sentence ? offers() : []).map((values) => {
      const named = Object.entries(values).map(([name, x]) => `${name}=${x}`);
      return elementOf('button', { type: 'button', onclick: () => set(values),
        textContent: `Choose ${named.join(', ')}` });
    }));
}

// A legend has the lines that are in the picture.
function showLegends() {
  for (const item of document.querySelectorAll('[data-shows]')) {
    item.hidden = !document.querySelector(item.dataset.shows);
  }
}

function draw() {
  showUnknown();
  const sentence = refusal(knobs);
  showRefusal(sentence);
  for (const id of ['weight', 'gain', 'reading', 'plus', 'minus', 'batch']) byId(id).classList.toggle('dim', !!sentence);
  showFormulas();
  drawAdvantages();
  drawPenalty();
  if (sentence) return;
  const applied = apply(DATA.batch, knobs);
  const at = curveOf(knobs, applied);
  current = { applied, at: penalised(at, knobs) };
  drawPlane(byId('plus'), 1, applied.bounds, at, applied);
  drawPlane(byId('minus'), -1, applied.bounds, at, applied);
  drawBatch(applied);
  const scored = at(1, 0.25, 1)[0] !== at(1, 0.95, 1)[0];
  byId('gain-note').textContent = scored ? 'This gain depends on log π(token). Its slope, the weight, is what moves the policy.' : '';
  drawHover();
}

function drawHover() {
  if (!current) return;
  const { applied, at } = current;
  drawCurves(byId('weight').querySelector('svg'), 1, applied.bounds, at);
  drawCurves(byId('gain').querySelector('svg'), 0, applied.bounds, at);
  drawReadout(at);
  drawPenalty();
  showLegends();
}

function hoverOn(svg, slices) {
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  svg.addEventListener('pointermove', (event) => {
    if (!svg.frame) return;
    hovered = clamp(svg.frame.fromX(at(event)[0]), 1 / knobs.range, knobs.range);
    drawHover();
  });
  svg.addEventListener('click', (event) => {
    if (!svg.frame) return;
    hovered = clamp(svg.frame.fromX(at(event)[0]), 1 / knobs.range, knobs.range);
    if (slices) set({ p: Number(clamp(svg.frame.fromY(at(event)[1]), 0.01, 1).toFixed(2)) });
    else drawHover();
  });
}

for (const svg of document.querySelectorAll('main > :not(#batch) .chart')) {
  hoverOn(svg, ['plus', 'minus'].includes(svg.closest('section').id));
}
for (const [id, names] of [['penalty-knobs', ['loss.kl', 'loss.kl_direction']], ['advantage-knobs', ['right']]]) {
  byId(id).append(...names.flatMap(controlsOf));
}
byId('reset').onclick = () => set({ ...DEFAULTS });
window.addEventListener('hashchange', () => { knobs = fromAddress(); buildControls(); draw(); });
window.addEventListener('resize', draw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
knobs = fromAddress();
buildControls();
draw();
