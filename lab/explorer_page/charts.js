// Draws curves in an svg and weights over a plane in a canvas.
//
// A frame has the size of its element in pixels and maps values to pixels. `curves`
// draws lines over a frame, `heat` colours every pixel of it.
'use strict';

const MARGIN = { left: 40, right: 16, top: 8, bottom: 34 };

// A frame over x (logarithmic or not) and y, each [least, most].
function frameOf(svg, x, y, logarithmic) {
  const [width, height] = [svg.clientWidth, svg.clientHeight];
  const of = logarithmic ? Math.log : (v) => v;
  const [x0, x1] = x.map(of);
  const [left, right] = [MARGIN.left, width - MARGIN.right];
  const [top, bottom] = [MARGIN.top, height - MARGIN.bottom];
  const back = logarithmic ? Math.exp : (v) => v;
  return {
    width, height, left, right, top, bottom, x, y,
    toX: (v) => left + (of(v) - x0) / (x1 - x0) * (right - left),
    toY: (v) => bottom - (v - y[0]) / (y[1] - y[0]) * (bottom - top),
    fromX: (px) => back(x0 + (px - left) / (right - left) * (x1 - x0)),
    fromY: (py) => y[0] + (bottom - py) / (bottom - top) * (y[1] - y[0]),
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
