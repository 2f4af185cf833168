// Draws the report of a run, or the comparison of runs, from the data of the page.
//
// 1. Texts become text nodes, never markup: a model may write anything;
// 2. `chartOf` draws a panel: bold, pale and exact curves, whose values can be read;
// 3. `tableOf` and `problemOf` draw tables and recorded responses;
// 4. `parts` orders whatever the data has.
'use strict';

const DATA = JSON.parse(byId('data').textContent);
const FEW = 20; // a running mean is over 1/20 of the steps; so few values get dots
const STRETCHES = 200; // a drawn curve has the lowest and the highest value of each
const RUNS = DATA.groups.flatMap((group) => group.runs);
const ALONE = RUNS.length === 1;
const FRAME = { left: 46, right: 8, top: 8, bottom: 24 };

// 1. Texts

// Shows invisible characters (control, direction of writing) as Python escapes.
function visible(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (char) => {
    if (char === '\n' || char === '\t') return char;
    if (char === '\r') return '\\r';
    const code = char.codePointAt(0).toString(16);
    if (code.length < 3) return `\\x${code.padStart(2, '0')}`;
    return code.length < 5 ? `\\u${code.padStart(4, '0')}` : `\\U${code.padStart(8, '0')}`;
  });
}

// An element with a class and children; a string becomes text, and null nothing.
function make(kind, className, ...children) {
  const shown = children.flat().filter((child) => child !== null && child !== '');
  return elementOf(kind, { className },
    ...shown.map((child) => (child instanceof Node ? child : visible(child))));
}

const note = (text) => make('p', 'note', text);
const fold = (head, ...children) => make('details', '', make('summary', '', head), ...children);

// 2. Charts

// The points [step, value] of a metric of a run, without gaps.
function series(run, name) {
  const values = run[name] ?? [];
  return values.map((value, i) => [run.step[i], value]).filter(([, value]) => value !== null);
}

// The mean of curves at the steps that all of them have.
function averaged(curves) {
  const [first = [], ...others] = curves;
  const rest = others.map((points) => new Map(points));
  return first.filter(([step]) => rest.every((values) => values.has(step))).map(([step, value]) =>
    [step, rest.reduce((sum, values) => sum + values.get(step), value) / curves.length]);
}

// The middle step and the mean of every full window of an odd number of values; the
// points themselves if they are few.
function smoothed(points, width) {
  if (width === 1 || points.length < 2 * width) return points;
  const half = (width - 1) / 2;
  return points.slice(half, points.length - half).map(([step], i) =>
    [step, points.slice(i, i + width).reduce((sum, [, value]) => sum + value, 0) / width]);
}

// The lowest and the highest point of each stretch of a long curve.
function thinned(points) {
  if (points.length <= 2 * STRETCHES) return points;
  const every = Math.ceil(points.length / STRETCHES);
  const kept = [];
  for (let i = 0; i < points.length; i += every) {
    const stretch = points.slice(i, i + every).sort((a, b) => a[1] - b[1]);
    const ends = stretch.length > 1 ? [stretch[0], stretch.at(-1)] : stretch;
    kept.push(...ends.sort((a, b) => a[0] - b[0]));
  }
  return kept;
}

// Whether a few values would flatten the others on a linear axis.
function isSpiky(points) {
  const values = points.map(([, value]) => value).sort((a, b) => a - b);
  if (!values.length) return false;
  const middle = (values[Math.floor((values.length - 1) / 2)] + values[Math.ceil((values.length - 1) / 2)]) / 2;
  return values[0] > 0 && values.at(-1) > 30 * middle;
}

const STEPS = [...new Set(RUNS.flatMap((run) => run.step ?? []))].sort((a, b) => a - b);
const width = Math.floor(STEPS.filter((step) => step !== 0).length / FEW) | 1;

// The curves of a panel: a colour per metric of one run, or per group of runs.
function curvesOf(panel) {
  const names = Object.keys(panel.labels);
  return DATA.groups.flatMap((group, i) => names.map((name, j) => {
    const runs = group.runs.map((run) => series(run, name)).filter((points) => points.length);
    const exact = averaged(runs);
    const evaluated = name in DATA.errors;
    const bold = evaluated ? exact : smoothed(exact, width);
    let pale = bold === exact || !ALONE ? [] : [exact];
    if (runs.length > 1) pale = evaluated ? runs : runs.map((points) => smoothed(points, width));
    const text = ALONE || names.length > 1 ? panel.labels[name] : '';
    const bars = evaluated && group.runs.length === 1
      ? new Map(series(group.runs[0], DATA.errors[name])) : new Map();
    return { label: `${group.label} ${text}`.trim(), colour: ALONE ? j : i,
      dashed: j > 0 && !ALONE, exact, bold, pale, bars };
  })).filter((curve) => curve.exact.length);
}

// A range with a margin; the range may be empty.
function spread(low, high) {
  const margin = 0.04 * (high - low) || 0.1 * Math.abs(high) || 0.5;
  return [low - margin, high + margin];
}

// The frame that all values, error bars and the level fit into.
function frameAround(svg, panel, curves, level) {
  const values = level === null ? [] : [level];
  for (const { bold, pale, bars } of curves) {
    for (const [step, value] of [bold, ...pale].flat()) {
      const error = bars.get(step) ?? 0;
      values.push(value - error, value + error);
    }
  }
  const [low, high] = values.reduce(
    ([least, most], x) => [Math.min(least, x), Math.max(most, x)], [Infinity, -Infinity]);
  const logY = panel.spiky && low > 0 && curves.some((curve) => isSpiky(curve.exact));
  const factor = high > low ? (high / low) ** 0.04 : 2;
  const y = logY ? [low / factor, high * factor] : spread(low, high);
  const frame = frameOf(svg, spread(STEPS[0], STEPS.at(-1)), y, { logY, margin: FRAME });
  return { ...frame, logY };
}

// The SVG of a curve: pale lines, error bars, the bold line, and dots if it has few points.
function drawn(frame, { colour, dashed, bold, pale, bars }) {
  let text = pale.map((points) => curve(frame, thinned(points), 'pale')).join('');
  const at = (step, y) => `${frame.toX(step).toFixed(1)} ${frame.toY(y).toFixed(1)}`;
  const ends = bold.filter(([step]) => bars.get(step)).map(([step, y]) =>
    `M${at(step, y + bars.get(step))}L${at(step, y - bars.get(step))}`);
  if (ends.length) text += `<path class="bar" d="${ends.join('')}"/>`;
  text += curve(frame, thinned(bold), 'bold');
  if (bold.length <= FEW) {
    text += bold.map(([x, y]) =>
      `<circle r="2.6" cx="${frame.toX(x).toFixed(1)}" cy="${frame.toY(y).toFixed(1)}"/>`).join('');
  }
  return `<g class="curve c${colour}${dashed ? ' dashed' : ''}">${text}</g>`;
}

function chartOf(panel) {
  const curves = curvesOf(panel);
  const level = 'clip/share' in panel.labels ? DATA.target ?? null : null;
  const keys = ALONE ? curves.filter(({ label }) => label).map(({ label, colour }) =>
    make('span', '', make('i', `key c${colour}`), label)) : [];
  if (ALONE && curves.length && level !== null) keys.push(make('span', '', make('i', 'key level'), 'target'));
  const caption = make('figcaption', '', make('b', '', panel.title), keys);
  if (!curves.length) return make('figure', 'card', caption, make('p', 'note empty', 'not recorded'));
  const labels = Object.values(panel.labels);
  const unit = panel.unit + (labels.length > 1 && !ALONE ? ` (${labels.join(', dashed: ')})` : '');
  const output = make('output', 'note', unit);
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  const attributes = { class: 'chart', viewBox: '0 0 400 210', role: 'img',
    'aria-label': `${panel.title}, ${unit}, over the steps` };
  for (const [name, value] of Object.entries(attributes)) svg.setAttribute(name, value);
  const frame = frameAround(svg, panel, curves, level);
  const steps = ticksOf(frame.x, 5).filter(Number.isInteger).map((x) => [x, String(x)]);
  let text = axes(frame, steps, frame.logY ? logTicksOf(frame.y) : ticksOf(frame.y, 5), '');
  if (level !== null) text += line(frame.left, frame.toY(level), frame.right, frame.toY(level), 'level');
  // Only numbers and names of classes: labels of users are never in here.
  svg.innerHTML = text + curves.map((x) => drawn(frame, x)).join('')
    + `<line class="hover" y1="${frame.top}" y2="${frame.bottom}" visibility="hidden"/>`;
  readable(svg, frame, curves, output);
  return make('figure', 'card', caption, output, svg);
}

// Shows the exact values of the step nearest to the pointer or the finger.
function readable(svg, frame, curves, output) {
  const unit = output.textContent;
  const values = new Map(); // step -> texts
  for (const { label, exact } of curves) {
    for (const [step, value] of exact) {
      const text = `${label} ${Number(value.toPrecision(6))}`.trim();
      values.set(step, [...values.get(step) ?? [], text]);
    }
  }
  const steps = [...values.keys()];
  const cursor = svg.querySelector('.hover');
  const show = (event) => {
    const box = svg.getBoundingClientRect();
    const x = frame.fromX((event.clientX - box.left) / box.width * frame.width);
    const step = steps.reduce((best, s) => (Math.abs(s - x) < Math.abs(best - x) ? s : best));
    output.textContent = visible(`step ${step}: ${values.get(step).join(', ')}`);
    cursor.setAttribute('x1', frame.toX(step));
    cursor.setAttribute('x2', frame.toX(step));
    cursor.setAttribute('visibility', 'visible');
  };
  svg.addEventListener('pointermove', show);
  svg.addEventListener('pointerdown', show);
  svg.addEventListener('pointerleave', (event) => {
    if (event.pointerType !== 'mouse') return;
    output.textContent = unit;
    cursor.setAttribute('visibility', 'hidden');
  });
}

function* curvesPart() {
  const averages = !ALONE && RUNS.length > DATA.groups.length;
  const some = DATA.every > 1 ? `one step in ${DATA.every}` : 'every step';
  let lines = `Bold lines are running means over ${width} steps`;
  if (ALONE) lines = width > 1 ? `${lines}, pale lines every value` : `Lines have the values of ${some}`;
  if (averages) lines += ' and over the runs of a group, pale lines its runs';
  yield make('h2', '', 'Curves');
  if (DATA.every > 1 && !(ALONE && width === 1)) lines += `, from ${some}`;
  yield note(`${lines}; evaluations are not smoothed and have bars of one standard error. `
    + 'Point at a chart, or touch it, to read the values of a step.');
  yield make('div', 'charts', DATA.panels.map(chartOf));
}

// A button per group, which hides its curves.
function legend() {
  return make('div', 'groups', DATA.groups.map(({ label, runs }, i) => {
    const seeds = runs.length > 1 ? ` (${runs.length} seeds)` : '';
    const button = make('button', '', swatch(i), label + seeds);
    button.type = 'button';
    button.ariaPressed = 'true';
    button.onclick = () => {
      const shown = button.ariaPressed !== 'true';
      button.ariaPressed = String(shown);
      for (const group of document.querySelectorAll(`.curve.c${i}`)) group.style.display = shown ? '' : 'none';
    };
    return button;
  }));
}

const swatch = (i) => make('i', `swatch c${i}`);

// 3. Tables and responses

const LABELS = DATA.groups.map((group) => group.label);
const DIFFERENCES = LABELS.slice(1).map((label) => `${label} - ${LABELS[0]}`);
// Name of a table -> its header, and the sides of its columns; the last is repeated.
const TABLES = {
  rewards: [['on held-out problems', 'before', 'after', 'change'], 'lr'],
  times: [['phase', 'seconds', 'percent'], 'lr'],
  progress: [['metric', 'first fifth', 'last fifth', 'meaning'], 'lrrl'],
  knobs: [['knob', 'value', 'default', 'meaning'], 'l'],
  differs: [['knob', ...LABELS, 'meaning'], 'l'],
  finals: [['metric', ...LABELS, ...DIFFERENCES], 'lr'],
  others: [['metric', ...LABELS, ...DIFFERENCES], 'lr'],
  runs: [['workdir', 'title', 'seed', 'steps', 'accuracy'], 'llr'],
};

function tableOf(name) {
  const [header, sides] = TABLES[name];
  const rows = DATA.tables[name];
  if (!rows.length) return make('p', '', header[0] === 'knob' ? 'No knob.' : 'No metric.');
  const cells = (kind, row) => make('tr', '', row.map((cell, i) =>
    make(kind, sides[i] ?? sides.at(-1), cell)));
  const isName = ['knob', 'metric'].includes(header[0]);
  const colours = DATA.groups.flatMap(({ runs }, i) => runs.map(() => i));
  const body = rows.map(([first, ...others], i) => cells('td', [
    isName ? make('code', '', first)
      : name === 'runs' ? make('span', '', swatch(colours[i]), first) : first, ...others]));
  return make('div', `scroll${header.at(-1) === 'meaning' ? ' meanings' : ''}`, make('table', '',
    make('thead', '', cells('th', header)), make('tbody', '', body)));
}

// Pieces [text, kind, title] of a text.
function spansOf(spans) {
  return spans.map(([text, kind, title]) => {
    if (!kind && !title) return text;
    const tag = ['mark', 'code'].includes(kind) ? kind : 'span';
    const span = make(tag, tag === kind ? '' : kind, text);
    span.title = title;
    return span;
  });
}

function pictureOf([name, address]) {
  if (!address) return note(`Picture: ${name}`);
  return elementOf('img', { src: address, alt: visible(name) });
}

// A problem with its responses, folded.
function problemOf({ head, note: origin, text, pictures, answer, responses, more }) {
  return fold(head,
    origin ? [note(origin), make('h3', '', 'The prompt, as the model read it')] : null,
    make('pre', '', text),
    pictures.map(pictureOf),
    answer ? make('p', '', 'Right answer: ', make('code', '', answer)) : null,
    make('div', 'pair', responses.map(({ kind, head: facts, text: pieces }) => make('div', '',
      make('p', '', spansOf(facts)), make('pre', `of-${kind}`, spansOf(pieces))))),
    more ? note(more) : null);
}

// 4. The page

function* parts() {
  const { tables } = DATA;
  yield make('h1', '', DATA.heading ?? DATA.title);
  if (!ALONE) yield legend();
  if (DATA.facts) yield note(DATA.facts);
  if (DATA.tiles) {
    yield make('div', 'tiles', DATA.tiles.map(([number, text]) =>
      make('div', 'card', make('b', '', number), make('small', '', text))));
  }
  yield* DATA.sentences.map((text) => make('p', '', text));
  if (tables.rewards?.length) yield tableOf('rewards');
  if (tables.differs) {
    yield make('h2', '', 'What differs');
    yield tableOf('differs');
    yield note(`Seeds, ${DATA.nuisance.join(', ')} may differ, too.`);
  }
  if (tables.finals) {
    yield make('h2', '', 'At the end');
    yield note('eval/ metrics are from the last evaluation, rollout/responses is the last count, '
      + 'the others are means over the last fifth of the steps. Groups of several seeds: '
      + `mean ± ${DATA.level} t interval over the seeds. A single run: its evaluation ± one `
      + 'standard error over the problems, without the variation between seeds. Differences: '
      + `mean ± t interval over the n ${DATA.unit}s that both have, for each number by itself; of `
      + 'many such intervals some miss the true difference.');
    yield tableOf('finals');
    yield fold('Other metrics', tableOf('others'));
  }
  yield* curvesPart();
  if (DATA.asked) {
    yield make('h2', '', `What the model was asked in step ${DATA.asked.step}`);
    yield make('p', '', DATA.asked.text);
    const problems = DATA.asked.problems.map(problemOf);
    problems[0].open = true;
    yield* problems;
  }
  if (DATA.changed) {
    yield make('h2', '', 'Held-out problems before and after');
    yield make('p', '', DATA.changed.text);
    yield* DATA.changed.problems.map(problemOf);
  }
  const titles = { times: 'Where the time went',
    progress: 'First fifth against last fifth of the steps',
    knobs: 'Knobs with an effect that are not at their defaults', runs: 'Runs' };
  for (const [name, title] of Object.entries(titles)) {
    if (!tables[name] || (!tables[name].length && name !== 'knobs')) continue;
    yield make('h2', '', title);
    yield tableOf(name);
  }
  if (DATA.config) yield fold('The whole config', make('pre', '', DATA.config));
}

document.querySelector('main').append(...parts());
