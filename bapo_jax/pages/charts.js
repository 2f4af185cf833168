// Makes elements, draws curves in an svg and weights over a plane in a canvas.
//
// A frame has the size of its svg, in pixels or of its viewBox, and maps values to it.
// `curve` draws a line over a frame, `heat` colours every pixel of it.
'use strict';

const byId = (id) => document.getElementById(id);
const elementOf = (kind, values = {}, ...children) => {
  const element = Object.assign(document.createElement(kind), values);
  element.append(...children);
  return element;
};
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

const MARGIN = { left: 40, right: 16, top: 8, bottom: 34 };

// Maps [least, most] to [start, end] and back, linearly or by logarithms.
function scaleOf([least, most], start, end, logarithmic) {
  const [of, back] = logarithmic ? [Math.log, Math.exp] : [(v) => v, (v) => v];
  const [low, high] = [of(least), of(most)];
  return {
    to: (v) => start + (of(v) - low) / (high - low) * (end - start),
    from: (px) => back(low + (px - start) / (end - start) * (high - low)),
  };
}

// A frame over x and y, each [least, most] and logarithmic or not.
function frameOf(svg, x, y, { logX = false, logY = false, margin = MARGIN } = {}) {
  const box = svg.viewBox.baseVal;
  const [width, height] = box?.width ? [box.width, box.height] : [svg.clientWidth, svg.clientHeight];
  const [left, right] = [margin.left, width - margin.right];
  const [top, bottom] = [margin.top, height - margin.bottom];
  const across = scaleOf(x, left, right, logX);
  const up = scaleOf(y, bottom, top, logY);
  return {
    width, height, left, right, top, bottom, x, y,
    toX: across.to, fromX: across.from, toY: up.to, fromY: up.from,
  };
}

const line = (x1, y1, x2, y2, name) =>
  `<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" class="${name}"/>`;
const words = (x, y, text, anchor = 'middle', name = '') =>
  `<text x="${x}" y="${y}" text-anchor="${anchor}" class="${name}">${text}</text>`;

// Round values between two ends, about `count` of them.
function ticksOf([least, most], count) {
  const raw = (most - least) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
  const ticks = [];
  for (let i = Math.ceil(least / step - 1e-9); i * step <= most + 1e-9 * step; i++) {
    ticks.push(i * step);
  }
  return ticks;
}

// Powers of ten and their multiples by 2 and 5 between two ends; some of them if many.
function logTicksOf([least, most]) {
  const ticks = [];
  for (let i = Math.floor(Math.log10(least)); i <= Math.log10(most); i++) {
    ticks.push(...[1, 2, 5].map((m) => Number(`${m}e${i}`)));
  }
  const inside = ticks.filter((x) => x >= least && x <= most);
  const every = Math.floor(inside.length / 7) + 1;
  return inside.filter((_, i) => i % every === 0);
}

// Ratios to label on an axis from 1/range to range.
function ratioTicks(range) {
  if (range >= 2) {
    const powers = [8, 4, 2].filter((x) => x <= range);
    return [...powers.map((x) => [1 / x, `1/${x}`]), [1, '1'],
      ...powers.reverse().map((x) => [x, String(x)])];
  }
  const digits = Math.ceil(-Math.log10(range - 1)) + 1;
  return ticksOf([1 / range, range], 4).map((x) => [x, x.toFixed(digits)]);
}

// Axes with ticks [value, label] along x, round values along y, and titles.
function axes(frame, xTicks, yTicks, title) {
  const { left, right, top, bottom, height } = frame;
  let text = '';
  for (const [value, label] of xTicks) {
    const x = frame.toX(value);
    text += line(x, top, x, bottom, 'grid') + words(x, bottom + 15, label,
      x > right - 10 && label.length > 4 ? 'end' : 'middle');
  }
  for (const value of yTicks) {
    const y = frame.toY(value);
    text += line(left, y, right, y, value === 0 ? 'axis' : 'grid');
    text += words(left - 6, y + 4, Number(value.toPrecision(6)), 'end');
  }
  return text + words((left + right) / 2, height - 3, title);
}

// A path through the points; a jump between neighbours is drawn upright.
function curve(frame, points, name) {
  const shown = points.filter(([, y]) => Number.isFinite(y));
  const at = ([x, y]) => `${frame.toX(x).toFixed(1)} ${
    clamp(frame.toY(y), frame.top - 2, frame.bottom + 2).toFixed(1)}`;
  return `<path class="${name}" d="M${shown.map(at).join('L')}"/>`;
}

const colourOf = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

// Colours the frame by value(x, y) in [0, 1]; NaN has the colour `nothing`.
function heat(canvas, frame, value, colours) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = frame.width * scale;
  canvas.height = frame.height * scale;
  const context = canvas.getContext('2d');
  const size = [frame.right - frame.left, frame.bottom - frame.top];
  const [wide, high] = size.map((x) => Math.max(1, Math.round(x)));
  const image = new ImageData(wide, high);
  const pixels = new Uint32Array(image.data.buffer);
  const [paper, full, nothing] = colours.map((name) => channels(colourOf(name)));
  const packed = ([red, green, blue]) => (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
  const shades = Array.from({ length: 256 }, (_, i) => packed(
    paper.map((from, c) => Math.round(from + (full[c] - from) * 0.8 * i / 255))));
  const blank = packed(nothing);
  for (let j = 0; j < high; j++) {
    const y = frame.fromY(frame.top + j + 0.5);
    for (let i = 0; i < wide; i++) {
      const v = value(frame.fromX(frame.left + i + 0.5), y);
      pixels[j * wide + i] = Number.isNaN(v) ? blank : shades[Math.round(255 * Math.min(v, 1))];
    }
  }
  const copy = new OffscreenCanvas(wide, high);
  copy.getContext('2d').putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.scale(scale, scale);
  context.drawImage(copy, frame.left, frame.top, frame.right - frame.left, high);
  return context;
}

// Draws points [x, y] as dots.
function dots(context, frame, points, radius, colour, edge) {
  context.fillStyle = colour;
  context.strokeStyle = edge;
  for (const [x, y] of points) {
    const [px, py] = [frame.toX(x), frame.toY(Math.min(y, 1))];
    if (px < frame.left || px > frame.right) continue;
    context.beginPath();
    context.arc(px, py, radius, 0, 2 * Math.PI);
    context.fill();
    if (edge) context.stroke();
  }
}
