// Moving and zooming a drawing: wheel, drag, two fingers, buttons, keys.

export class PanZoom {
  constructor(frame, layer) {
    this.frame = frame;
    this.layer = layer;
    this.x = 0;
    this.y = 0;
    this.scale = 1;
    this.fingers = new Map();
    this.dragged = false;
    frame.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    frame.addEventListener("pointerdown", (event) => this.down(event));
    frame.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) {
      frame.addEventListener(name, (event) => this.fingers.delete(event.pointerId));
    }
  }

  show() {
    this.layer.setAttribute("transform", `translate(${this.x} ${this.y}) scale(${this.scale})`);
    this.frame.dataset.scale = this.scale.toFixed(3);
  }

  // Zooms so that the point of the frame under (x, y) stays where it is.
  zoom(factor, x = this.frame.clientWidth / 2, y = this.frame.clientHeight / 2) {
    const scale = Math.min(4, Math.max(0.04, this.scale * factor));
    this.x = x - ((x - this.x) * scale) / this.scale;
    this.y = y - ((y - this.y) * scale) / this.scale;
    this.scale = scale;
    this.show();
  }

  pan(dx, dy) {
    this.x += dx;
    this.y += dy;
    this.show();
  }

  // The whole drawing, or its top where it would be too small to read.
  fit(width, height, smallest = 0.45) {
    const [w, h] = [this.frame.clientWidth, this.frame.clientHeight];
    const whole = Math.min(1.1, (w - 16) / width, (h - 16) / height);
    this.scale = Math.max(whole, Math.min(smallest, 1.1));
    this.x = (w - width * this.scale) / 2;
    this.y = height * this.scale > h ? 8 : (h - height * this.scale) / 2;
    this.show();
  }

  // Brings a rectangle of the drawing into the middle, unless it is in sight.
  reveal(x, y, width, height, always = false) {
    const [w, h] = [this.frame.clientWidth, this.frame.clientHeight];
    if (this.scale < 0.5) this.zoom(0.8 / this.scale);
    const left = this.x + x * this.scale;
    const top = this.y + y * this.scale;
    const seen = left > 8 && top > 8 && left + width * this.scale < w - 8 && top + height * this.scale < h - 8;
    if (seen && !always) return;
    this.x = w / 2 - (x + width / 2) * this.scale;
    this.y = h / 2 - (y + height / 2) * this.scale;
    this.show();
  }

  wheel(event) {
    event.preventDefault();
    const box = this.frame.getBoundingClientRect();
    const step = event.deltaMode === 1 ? event.deltaY * 20 : event.deltaY;
    this.zoom(Math.exp(-step * (event.ctrlKey ? 0.01 : 0.0015)), event.clientX - box.left, event.clientY - box.top);
  }

  down(event) {
    this.fingers.set(event.pointerId, [event.clientX, event.clientY]);
    this.dragged = false;
  }

  move(event) {
    const before = this.fingers.get(event.pointerId);
    if (!before) return;
    const now = [event.clientX, event.clientY];
    const others = [...this.fingers].filter(([id]) => id !== event.pointerId).map(([, point]) => point);
    if (others.length) {
      const box = this.frame.getBoundingClientRect();
      const [other] = others;
      const apart = (point) => Math.hypot(point[0] - other[0], point[1] - other[1]) || 1;
      this.zoom(apart(now) / apart(before), other[0] - box.left, other[1] - box.top);
      this.dragged = true;
    } else if (this.dragged || Math.hypot(now[0] - before[0], now[1] - before[1]) > 3) {
      this.dragged = true;
      this.pan(now[0] - before[0], now[1] - before[1]);
    } else {
      return;
    }
    this.fingers.set(event.pointerId, now);
  }
}
