"use strict";
// Draws the plots of a report, and keeps a live one up to date. Data comes from observe/report.py.

// --- Functions without a page ---------------------------------------------------------------------------------------

// The mean around each point, with weights that fall off exponentially to both sides, over about `width` steps. Both
// sides count, since an average of the past alone would lag behind a falling loss.
function smooth(x, y, width) {
  const sums = y.slice(), weights = y.map(() => 1);
  for (const [first, end, step] of [[0, y.length, 1], [y.length - 1, -1, -1]]) {
    let sum = 0, weight = 0;
    for (let i = first; i !== end; i += step) {
      sums[i] += sum;
      weights[i] += weight;
      const next = i + step, keep = next === end ? 0 : Math.exp(-2 * Math.abs(x[next] - x[i]) / width);
      sum = (sum + y[i]) * keep;
      weight = (weight + 1) * keep;
    }
  }
  return sums.map((sum, i) => sum / weights[i]);
}

// The index of the value nearest to `target` in ascending numbers; -1 if there are none.
function nearest(x, target) {
  let low = 0, high = x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < target) low = middle + 1;
    else high = middle;
  }
  return low > 0 && target - x[low - 1] <= x[low] - target ? low - 1 : high < 0 ? -1 : low;
}

// Round numbers within [low, high]; on a logarithmic axis powers of ten, or 1, 2 and 5 times these.
function ticks(low, high, log, about) {
  if (log && high / low >= 4) {
    const found = [], decades = Math.log10(high / low);
    const every = Math.max(1, Math.ceil(decades / about));
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      if (power % every) continue;
      for (const factor of decades < 3 ? [1, 2, 5] : [1]) {
        const value = factor * 10 ** power;
        if (value >= low && value <= high) found.push(value);
      }
    }
    return found;
  }
  const rough = (high - low) / about, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high && found.length < 100; i++) found.push(i * step);
  return found;
}

// Keeps sums and differences of values finite.
function clamp(value) {
  return Math.max(-1e300, Math.min(1e300, value));
}

// A range that is not empty, with a margin as a share of it; a logarithmic one has positive ends and no margin.
function range(values, log, margin) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (log && value < 1e-300) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return log ? [1, 10] : [0, 1];
  if (log) return low < high ? [low, high] : [low / 2, high * 2];
  const room = low < high ? (high - low) * margin : Math.abs(low) * 0.1 || 0.5;
  return [low - room, high + room];
}

// From values to places between `start` and `end`.
function scale([low, high], start, end, log) {
  const of = log ? Math.log : value => value;
  const from = of(low), per = (end - start) / (of(high) - of(low));
  return value => start + (of(value) - from) * per;
}

function number(value) {
  const size = Math.abs(value);
  if (size >= 1e6 || (size && size < 1e-3)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(+value.toPrecision(size < 100 ? 5 : 6));
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e4 && size < 1e15) {
    for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= unit) return +(value / unit).toPrecision(4) + name;
    }
  }
  if (size >= 1e15 || (size && size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(+value.toPrecision(4));
}

// From the slider, 0 to 100, to the width of the average in steps; 0 is off, 100 a fifth of all steps.
function smoothingWidth(position, steps) {
  return position ? Math.max(2, Math.pow(Math.max(10, steps / 5), position / 100)) : 0;
}

// --- The page -------------------------------------------------------------------------------------------------------

const HEIGHT = 250, LEFT = 52, RIGHT = 16, TOP = 12, BOTTOM = 32, PALETTE = 8;
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];

function start() {
  let data = JSON.parse(document.getElementById("data").textContent);
  const page = {width: 0, logSteps: false, step: null, hidden: new Set(), logValues: new Set()};
  const holder = document.getElementById("plots"), charts = new Map(), parts = new Map();
  const slider = document.getElementById("smoothing"), logSteps = document.getElementById("log-steps");
  const controls = document.getElementById("controls");
  controls.hidden = false;
  controls.addEventListener("submit", event => event.preventDefault());

  function element(name, attributes, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function drawing(name, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  // The lines of a plot: one per metric and run, with its points, colour and dashes.
  function linesOf(plot) {
    const several = data.runs.length > 1, found = [];
    data.runs.forEach((run, r) => plot.lines.forEach((line, l) => {
      if (!Object.hasOwn(run.series, line.metric)) return;  // a metric may be called __proto__
      const points = run.series[line.metric];
      const index = several ? r : l;
      const dash = line.marked ? "4 3" : DASHES[Math.floor(index / PALETTE) % DASHES.length];
      const label = !several ? line.label : plot.lines.length > 1 ? run.name + ", " + line.label : run.name;
      found.push({...line, points, dash, label, key: label, colour: "var(--series-" + index % PALETTE + ")"});
    }));
    return found;
  }

  class Chart {
    constructor(key, title, histogram) {
      this.key = key;
      this.name = title;
      this.histogram = histogram;
      this.place = null;
      this.svg = drawing("svg", {"aria-hidden": "true"});
      this.readout = element("div", {class: "readout", "aria-hidden": "true"});
      this.readout.hidden = true;
      this.plot = element("div", {class: "plot", tabindex: "0", role: "slider", "aria-orientation": "horizontal"},
        this.svg, this.readout);
      this.legend = element("ul", {class: "legend"});
      this.title = element("h2", {});
      this.title.textContent = title;
      const head = element("div", {class: "title"}, this.title);
      if (!histogram) {
        const box = element("input", {type: "checkbox"});
        box.addEventListener("change", () => {
          page.logValues[box.checked ? "add" : "delete"](key);
          this.draw();
        });
        head.append(element("label", {}, box, " logarithmic"));
      }
      this.figure = element("figure", {}, head, this.plot, this.legend);
      this.plot.addEventListener("pointermove", event => this.point(event));
      this.plot.addEventListener("pointerdown", event => this.point(event));
      this.plot.addEventListener("pointerleave", event => event.pointerType === "mouse" && this.leave());
      this.plot.addEventListener("blur", () => this.leave());
      this.plot.addEventListener("keydown", event => this.press(event));
      this.buttons = "";
    }

    set(plot) {
      this.source = plot;
      this.draw();
    }

    draw() {
      this.lines = this.histogram ? this.bars() : linesOf(this.source);
      this.drawLegend();
      this.shown = this.lines.filter(line => !page.hidden.has(this.key + "\n" + line.key));
      this.logX = page.logSteps && !this.histogram;
      this.logY = page.logValues.has(this.key);
      const width = Math.max(260, this.plot.clientWidth || 560);
      this.size = width;
      this.places = null;
      const bottom = HEIGHT - BOTTOM;
      const fits = (x, y) => (!this.logX || x > 0) && (!this.logY || y >= 1e-300);
      const xs = [], ys = this.histogram ? [0] : [];
      for (const line of this.shown) {
        line.x = [];
        line.y = [];
        line.points.x.forEach((x, i) => {
          if (fits(x, line.points.y[i])) line.x.push(x), line.y.push(clamp(line.points.y[i]));
        });
        for (const x of line.x) xs.push(x);
        for (const y of line.y) ys.push(y);
        for (const x of line.points.bad || []) xs.push(x);
        if (page.width && line.smooth) {
          const mean = line.points.mean_x.length > 0;
          const x = mean ? line.points.mean_x : line.points.x, y = mean ? line.points.mean_y : line.points.y;
          line.smoothX = x;
          line.smoothY = smooth(x, y.map(clamp), page.width);
        } else line.smoothX = null;
      }
      if (this.histogram) xs.push(this.source.low, this.source.high);
      const xRange = range(xs, this.logX, 0), yRange = range(ys, this.logY, this.histogram ? 0 : 0.03);
      this.xRange = xRange;
      this.toX = scale(xRange, LEFT, width - RIGHT, this.logX);
      this.toY = scale(yRange, bottom, TOP, this.logY);
      const parts = [];
      const add = (name, attributes, text) => {
        const made = drawing(name, attributes);
        if (text !== undefined) made.textContent = text;
        parts.push(made);
        return made;
      };
      for (const value of ticks(...yRange, this.logY, 5)) {
        const y = this.toY(value).toFixed(1);
        add("line", {class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: y, y2: y});
        add("text", {x: LEFT - 6, y: +y + 4, "text-anchor": "end"}, short(value));
      }
      for (const value of ticks(...xRange, this.logX, Math.max(2, Math.min(8, width / 80)))) {
        const whole = this.histogram || Number.isInteger(value);
        if (!whole) continue;
        const x = Math.min(this.toX(value), width - 3 - 3.3 * short(value).length);
        add("text", {x: x.toFixed(1), y: bottom + 15, "text-anchor": "middle"}, short(value));
      }
      const name = this.histogram ? "seconds" : "step";
      add("text", {x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 3, "text-anchor": "middle"}, name);
      if (this.histogram) this.drawBars(add, bottom);
      else this.drawLines(add, bottom, fits);
      this.marker = drawing("line", {class: "crosshair", y1: TOP, y2: bottom});
      this.dots = drawing("g", {});
      this.svg.setAttribute("viewBox", "0 0 " + width + " " + HEIGHT);
      this.svg.replaceChildren(...parts, this.marker, this.dots);
      this.plot.setAttribute("aria-valuemin", xRange[0]);
      this.plot.setAttribute("aria-valuemax", xRange[1]);
      this.plot.setAttribute("aria-label", this.name + " by " + name + ", " + this.shown.map(l => l.label).join(", ") +
        ". Arrow keys read values.");
      this.show(this.place, !this.readout.hidden);
    }

    drawLines(add, bottom, fits) {
      data.runs.forEach((run, r) => {
        for (const step of run.restarts) {
          if (step < this.xRange[0] || step > this.xRange[1]) continue;
          const x = this.toX(step).toFixed(1);
          const line = add("line", {class: "restart", x1: x, x2: x, y1: TOP, y2: bottom});
          if (data.runs.length > 1) line.style.stroke = "var(--series-" + r % PALETTE + ")";
        }
      });
      const path = (x, y) => {
        let text = "";
        for (let i = 0; i < x.length; i++) {
          if (!fits(x[i], y[i])) continue;
          text += (text ? "L" : "M") + this.toX(x[i]).toFixed(1) + " " + this.toY(y[i]).toFixed(1);
        }
        return text;
      };
      for (const line of this.shown) {
        const style = {style: "stroke:" + line.colour, "stroke-dasharray": line.dash || "none"};
        const raw = add("path", {class: line.smoothX ? "line raw" : "line", d: path(line.x, line.y), ...style});
        if (line.smooth && line.x.length > 500) raw.style.strokeWidth = 1;
        if (line.smoothX) add("path", {class: "line", d: path(line.smoothX, line.smoothY), ...style});
        if ((line.marked && line.x.length < 60) || line.x.length === 1) {
          line.x.forEach((x, i) => add("circle", {cx: this.toX(x).toFixed(1), cy: this.toY(line.y[i]).toFixed(1), r: 3,
            style: "fill:" + line.colour}));
        }
        for (const step of line.points.bad) {
          if (this.logX && step <= 0) continue;
          const x = this.toX(step);
          add("path", {class: "bad", d: "M" + (x - 3) + " 2L" + (x + 3) + " 8M" + (x - 3) + " 8L" + (x + 3) + " 2"});
        }
      }
    }

    bars() {
      const {low, high, counts} = this.source, bins = counts[0].length, width = (high - low) / bins;
      return counts.map((row, r) => ({
        label: data.runs[r].name, key: data.runs[r].name, colour: "var(--series-" + r % PALETTE + ")",
        points: {x: row.map((_, i) => low + (i + 0.5) * width), y: row, bad: [], mean_x: []}, half: width / 2,
      }));
    }

    drawBars(add, bottom) {
      const several = this.shown.length > 1;
      for (const line of this.shown) {
        line.x.forEach((x, i) => {
          if (!line.y[i]) return;
          const left = this.toX(x - line.half), right = this.toX(x + line.half), top = this.toY(line.y[i]);
          add("rect", {x: left.toFixed(1), y: top.toFixed(1), width: Math.max(1, right - left - 1).toFixed(1),
            height: (bottom - top).toFixed(1), style: "fill:" + line.colour + ";fill-opacity:" + (several ? 0.5 : 0.8)});
        });
      }
    }

    drawLegend() {
      const labels = this.lines.length > 1 ? this.lines : [];
      const wanted = JSON.stringify(labels.map(line => line.key));
      if (wanted === this.buttons) return;  // so that a button keeps its focus
      this.buttons = wanted;
      this.legend.replaceChildren(...labels.map(line => {
        const id = this.key + "\n" + line.key;
        const swatch = element("span", {class: "swatch"});
        swatch.style.borderTopColor = line.colour;
        if (line.dash) swatch.style.borderTopStyle = "dashed";
        const button = element("button", {type: "button", "aria-pressed": String(!page.hidden.has(id))}, swatch, " ");
        button.append(line.label);
        button.addEventListener("click", () => {
          page.hidden[page.hidden.has(id) ? "delete" : "add"](id);
          button.setAttribute("aria-pressed", String(!page.hidden.has(id)));
          this.draw();
        });
        return element("li", {}, button);
      }));
    }

    // All steps that any visible line has, for the crosshair.
    stops() {
      if (this.places === null) {
        const all = new Set();
        for (const line of this.shown) for (const x of line.x) all.add(x);
        this.places = [...all].sort((a, b) => a - b);
      }
      return this.places;
    }

    point(event) {
      const box = this.svg.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width * this.size, stops = this.stops();
      const i = nearest(stops.map(this.toX), at);
      this.move(i < 0 ? null : stops[i]);
    }

    press(event) {
      const stops = this.stops();
      if (!stops.length) return;
      const here = this.place === null ? -1 : nearest(stops, this.place), jump = event.shiftKey ? 10 : 1;
      const to = {ArrowRight: here + jump, ArrowUp: here + jump, ArrowLeft: here - jump, ArrowDown: here - jump,
        PageUp: here + 100, PageDown: here - 100, Home: 0, End: stops.length - 1}[event.key];
      if (event.key === "Escape") this.leave();
      if (to === undefined) return;
      event.preventDefault();
      this.move(stops[Math.max(0, Math.min(stops.length - 1, to))]);
    }

    // Shows the values here, and the same step on the other plots.
    move(place) {
      for (const chart of charts.values()) {
        if (chart === this) chart.show(place, true);
        else chart.show(this.histogram || chart.histogram ? null : place, false);
      }
    }

    leave() {
      for (const chart of charts.values()) chart.show(null, false);
    }

    show(place, withValues) {
      this.place = place;
      const inside = place !== null && place >= this.xRange[0] && place <= this.xRange[1] && this.shown.length > 0;
      this.marker.style.display = inside ? "" : "none";
      this.dots.replaceChildren();
      this.readout.hidden = !inside || !withValues;
      if (!inside) return;
      const at = this.toX(place);
      this.marker.setAttribute("x1", at);
      this.marker.setAttribute("x2", at);
      if (!withValues) return;
      const rows = [], spoken = [];
      const head = this.histogram ? this.bin(place) : "step " + place.toLocaleString("en-US");
      for (const line of this.shown) {
        const i = nearest(line.x, place);
        if (i < 0) continue;
        let text = this.histogram ? line.y[i].toLocaleString("en-US") + " steps" : number(line.y[i]);
        if (line.smoothX) text += ", smoothed " + number(line.smoothY[nearest(line.smoothX, place)]);
        if (line.x[i] !== place) text += " (step " + line.x[i].toLocaleString("en-US") + ")";
        const swatch = element("span", {class: "swatch"});
        swatch.style.borderTopColor = line.colour;
        if (line.dash) swatch.style.borderTopStyle = "dashed";
        const name = this.lines.length > 1 ? line.label + ": " : "";
        rows.push(element("div", {}, swatch, " " + name + text));
        spoken.push(name + text);
        if (!this.histogram) {
          this.dots.append(drawing("circle", {cx: this.toX(line.x[i]), cy: this.toY(line.y[i]), r: 3.5,
            style: "fill:" + line.colour}));
        }
      }
      const title = element("div", {});
      title.textContent = head;
      this.readout.replaceChildren(title, ...rows);
      const left = at / this.size < 0.5;
      this.readout.style.left = left ? at / this.size * 100 + 2 + "%" : "auto";
      this.readout.style.right = left ? "auto" : (1 - at / this.size) * 100 + 2 + "%";
      this.plot.setAttribute("aria-valuenow", place);
      this.plot.setAttribute("aria-valuetext", head + ": " + spoken.join(", "));
    }

    bin(place) {
      const {high, counts, longest, low} = this.source, half = (high - low) / counts[0].length / 2;
      const last = place + half * 1.5 > high;
      return number(place - half) + " to " + number(last ? Math.max(longest, high) : place + half) + " s";
    }
  }

  function drawAll() {
    const wanted = data.plots.map(plot => ["metric " + plot.lines[0].metric, plot.title, plot, false]);
    if (data.histogram) wanted.splice(Math.min(4, wanted.length), 0, ["step times", "Step times", data.histogram, true]);
    const keys = new Set(wanted.map(([key]) => key));
    for (const [key, chart] of charts) if (!keys.has(key)) chart.figure.remove(), charts.delete(key);
    wanted.forEach(([key, title, , histogram], i) => {
      if (!charts.has(key)) charts.set(key, new Chart(key, title, histogram));
      const chart = charts.get(key);
      if (holder.children[i] !== chart.figure) holder.insertBefore(chart.figure, holder.children[i] || null);
    });
    for (const [key, , plot] of wanted) charts.get(key).set(plot);  // after all are placed, so that widths are known
  }

  function mostSteps() {
    let most = 1;
    for (const run of data.runs) for (const {x} of Object.values(run.series)) most = Math.max(most, x[x.length - 1] || 1);
    return most;
  }

  function setSmoothing() {
    page.width = smoothingWidth(+slider.value, mostSteps());
    const text = page.width ? "about " + Math.round(page.width).toLocaleString("en-US") + " steps" : "off";
    document.getElementById("smoothing-text").textContent = text;
    slider.setAttribute("aria-valuetext", text);
  }

  slider.addEventListener("input", () => {
    setSmoothing();
    for (const chart of charts.values()) chart.draw();
  });
  logSteps.addEventListener("change", () => {
    page.logSteps = logSteps.checked;
    for (const chart of charts.values()) chart.draw();
  });
  if (mostSteps() > 500 && slider.value === "0") slider.value = 40;
  page.logSteps = logSteps.checked;  // a browser may keep it over a reload
  setSmoothing();
  drawAll();
  let resizing = 0;
  const fit = () => {
    for (const chart of charts.values()) if (chart.plot.clientWidth !== chart.size) chart.draw();
  };
  addEventListener("resize", () => {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(fit);
  });
  matchMedia("print").addEventListener("change", fit);
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
  if (data.live) poll();

  // Asks the server every two seconds while the page is visible, and draws what is new.
  function poll() {
    const status = document.getElementById("status");
    let tag = "", timer = 0, lost = false;
    const age = () => {
      const modified = Math.max(...data.runs.map(run => run.modified));
      if (!modified) return "waiting for the first step";
      if (data.runs.every(run => run.finished)) return "all steps are done";
      const seconds = Math.max(0, Math.round(Date.now() / 1000 - modified));
      return "last step written " + (seconds < 120 ? seconds + " s" : Math.round(seconds / 60) + " min") + " ago";
    };
    async function ask() {
      clearTimeout(timer);
      try {
        const answer = await fetch("data.json", {headers: tag ? {"If-None-Match": tag} : {}, cache: "no-store"});
        if (answer.status === 200) {
          const found = await answer.json();
          tag = answer.headers.get("ETag") || "";
          data = found;
          replaceParts(found.html);
          setSmoothing();
          drawAll();
        } else if (answer.status !== 304) throw new Error(String(answer.status));
        lost = false;
        status.textContent = "live, " + age();
      } catch (error) {
        if (!lost) status.textContent = "the server does not answer since " + new Date().toLocaleTimeString();
        lost = true;
      }
      status.classList.toggle("alert", lost);
      timer = setTimeout(ask, document.hidden ? 60000 : lost ? 5000 : 2000);
    }
    document.addEventListener("visibilitychange", () => document.hidden || ask());
    ask();
  }

  // The HTML around the plots. Parts that did not change stay, and so do details that the reader opened or closed.
  function replaceParts(found) {
    for (const [name, text] of Object.entries(found)) {
      if (parts.get(name) === text) continue;
      parts.set(name, text);
      const part = document.getElementById(name), chosen = new Map();
      for (const details of part.querySelectorAll("details")) {
        if (details.open !== (details.dataset.open === "true")) chosen.set(details.dataset.key, details.open);
      }
      part.innerHTML = text;
      for (const details of part.querySelectorAll("details")) {
        if (chosen.has(details.dataset.key)) details.open = chosen.get(details.dataset.key);
      }
    }
  }
}

if (typeof document !== "undefined") start();
else module.exports = {smooth, nearest, ticks, clamp, range, scale, number, short, smoothingWidth};
