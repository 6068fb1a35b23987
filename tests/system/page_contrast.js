// Texts whose contrast is below WCAG 2.2, 1.4.3, against the first opaque background behind them. Empty: none.
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const seen = new Map();
  const rgba = (colour) => {
    if (!seen.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      seen.set(colour, [...canvas.getImageData(0, 0, 1, 1).data]);
    }
    return seen.get(colour);
  };
  const luminance = (channels) => {
    const [r, g, b] = channels.map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const problems = new Set();
  for (const e of document.querySelectorAll("body *")) {
    if (![...e.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim())) continue;
    if (!e.checkVisibility() || e.closest("svg, .sr, .skip")) continue;
    const style = getComputedStyle(e);
    let behind = e;
    let back = [0, 0, 0, 0];
    while (behind && back[3] < 255) {
      back = rgba(getComputedStyle(behind).backgroundColor);
      behind = behind.parentElement;
    }
    const [one, other] = [luminance(rgba(style.color).slice(0, 3)), luminance(back.slice(0, 3))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) {
      problems.add(`${ratio.toFixed(2)}: ${e.textContent.trim().slice(0, 40)}`);
    }
  }
  return [...problems];
}
