() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (below, colour) => {
    canvas.fillStyle = below;
    canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return `rgb(${[...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).join(" ")})`;
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.match(/\d+/g).map((part) => part / 255)
      .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const on = element.matches("text.on") && element.previousElementSibling;
    if (on) return getComputedStyle(on).fill;
    const below = element.parentElement ? behind(element.parentElement) : "white";
    return over(below, getComputedStyle(element).backgroundColor);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility() || element.closest(".unseen, script")) continue;
    const style = getComputedStyle(element), ground = behind(element);
    const colour = over(ground, element.closest("svg") ? style.fill : style.color);
    const [light, dark] = [luminance(colour), luminance(over("white", ground))].sort((a, b) => b - a);
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      found.push({
        text: node.data.trim(), contrast: (light + 0.05) / (dark + 0.05),
        box: [box.left + 1, box.top + 2, box.right - 1, box.bottom - 2],
      });
    }
  }
  return found;
}
