// The elements that are wholly visible, with their boxes in pixels.
() => {
  const found = [];
  for (const e of document.querySelectorAll('[data-role]')) {
    let r = e.getBoundingClientRect();
    if (['heading', 'cell', 'link', 'menu item'].includes(e.dataset.role)) {
      const range = document.createRange(); range.selectNodeContents(e); r = range.getBoundingClientRect();
    }
    if (['checkbox', 'radio'].includes(e.dataset.role)) {
      const label = e.querySelector('label').getBoundingClientRect();
      const box = e.querySelector('input').getBoundingClientRect();
      const left = Math.min(box.width > 2 ? box.left : label.left, label.left), top = Math.min(box.top, label.top);
      r = new DOMRect(left, top, label.right - left, Math.max(box.bottom, label.bottom) - top);
    }
    if (r.width < 6 || r.height < 6 || r.left < 0 || r.top < 0 || r.right > innerWidth || r.bottom > innerHeight) continue;
    const at = document.elementFromPoint(r.left + r.width / 2, r.top + r.height / 2);
    if (!at || !(e.contains(at) || at.contains(e))) continue;
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 && e.tagName === 'INPUT') continue;
    found.push({...e.dataset, box: [r.left, r.top, r.right, r.bottom].map(v => Math.round(v * 10) / 10)});
  }
  return found;
}
