// Texts that canvases got, each with the middles of its characters, until the canvas is cleared.
let TEXTS = [];
const CANVAS = CanvasRenderingContext2D.prototype, {fillText, clearRect} = CANVAS;
CANVAS.fillText = function (text, x, y, ...more) {
  const wide = s => this.measureText(s).width, all = this.measureText(text), m = this.getTransform();
  const left = x - {center: 0.5, right: 1, end: 1}[this.textAlign] * all.width || x - 0;
  const middle = y + (all.actualBoundingBoxDescent - all.actualBoundingBoxAscent) / 2;
  const at = [...text].map((c, i) => m.transformPoint({x: left + wide(text.slice(0, i)) + wide(c) / 2, y: middle}));
  TEXTS.push({text, at, canvas: this.canvas});
  return fillText.call(this, text, x, y, ...more);
};
CANVAS.clearRect = function (x, y, w, h) {
  if (w >= this.canvas.width) TEXTS = TEXTS.filter(t => t.canvas !== this.canvas);
  return clearRect.call(this, x, y, w, h);
};
const corners = r => [r.left, r.top, r.right, r.bottom], around = (x, y) => [x - 4, y - 4, x + 4, y + 4];
// The texts as [text, [x, y, x, y ...]] and PLACES: the box of each value by series.
function shown() {
  const found = TEXTS.filter(t => t.canvas.isConnected).map(({text, at, canvas}) => {
    const {left, top} = canvas.getBoundingClientRect();
    return [text, at.map(p => [p.x + left, p.y + top])];
  });
  for (const t of document.querySelectorAll('#c svg text')) {
    if (!t.checkVisibility({opacityProperty: true, visibilityProperty: true}) || !t.getNumberOfChars()) continue;
    const m = t.getScreenCTM(), middle = b => new DOMPoint(b.x + b.width / 2, b.y + b.height / 2).matrixTransform(m);
    const at = [...Array(t.getNumberOfChars()).keys()].map(i => middle(t.getExtentOfChar(i)));
    if (t.textContent.length === at.length) found.push([t.textContent, at.map(p => [p.x, p.y])]);
  }
  return {texts: found.map(([text, at]) => [text, at.flat().map(v => Math.round(v * 10) / 10)]), boxes: PLACES()};
}
let PLACES = () => [];
const each = (t, box) => PLACES = () => t.series.map((s, i) => t.labels.map((n, j) => box(s, i, n, j)));
const FORMS = {'': v => `${+v.toFixed(6)}`, ',': v => (+v.toFixed(6)).toLocaleString('en'), k: v => `${+(v / 1000).toFixed(4)}k`,
  '%': v => `${+v.toFixed(6)}%`, $: v => '$' + (+v.toFixed(6)).toLocaleString('en')};
// Library to the function that draws a table (tables.py) into the element "c".
const DRAW = {
  echarts: t => {
      const c = echarts.init(document.getElementById('c'), t.dark ? 'dark' : null, {width: t.width, height: t.height});
      const font = {fontFamily: t.font, fontSize: t.size};
      const values = {animation: false, title: {text: t.title, left: t.left ? 'left' : 'center', textStyle: {fontFamily: t.font, fontSize: t.head * t.size}},
        color: t.colours, textStyle: font};
      if (t.series.length > 1 || t.kind === 'pie') values.legend = {bottom: 4, textStyle: font};
      if (t.kind === 'pie') {
        values.series = [{type: 'pie', radius: t.hole ? ['35%', '62%'] : '62%',
          data: t.labels.map((n, i) => ({name: n, value: t.series[0].values[i]})),
          label: {...font, formatter: t.numbers ? '{b}: {c}' : '{b}'}}];
      } else {
        const cat = {type: 'category', data: t.labels, name: t.label_axis,
          axisLabel: t.turn && !t.lying ? {...font, interval: 0, rotate: t.turn} : font};
        const num = {type: 'value', name: t.value_axis, axisLabel: {...font, formatter: FORMS[t.form]},
          splitNumber: t.ticks, splitLine: {show: t.grid}, axisLine: {show: !t.grid}, axisTick: {show: !t.grid}};
        values.grid = {containLabel: true, bottom: t.series.length > 1 ? 40 : 20};
        values[t.lying ? 'yAxis' : 'xAxis'] = cat; values[t.lying ? 'xAxis' : 'yAxis'] = num;
        values.series = t.series.map(s => ({name: s.name, data: s.values,
          type: {bar: 'bar', line: 'line', scatter: 'scatter'}[t.kind], smooth: t.smooth, symbolSize: 8, barCategoryGap: `${100 * t.gap}%`, barGap: t.smooth ? '0%' : '20%',
          label: {...font, show: t.numbers, position: t.lying ? 'right' : 'top'}}));
      }
      c.setOption(values);
      each(t, (s, i, n, j) => {
        if (t.kind !== 'bar' && t.kind !== 'pie') return around(...c.convertToPixel({seriesIndex: i}, [j, s.values[j]]));
        const b = c.getModel().getSeriesByIndex(i).getData().getItemLayout(j), turn = (b.startAngle + b.endAngle) / 2;
        if (t.kind === 'pie') return around(b.cx + 0.72 * b.r * Math.cos(turn), b.cy + 0.72 * b.r * Math.sin(turn));
        return corners(new DOMRect(b.x, b.y, b.width, b.height));
      });
    },
  chartjs: t => {
      const canvas = document.createElement('canvas'); const box = document.getElementById('c');
      box.style.width = t.width + 'px'; box.style.height = t.height + 'px'; box.appendChild(canvas);
      Chart.defaults.animation = false; Chart.defaults.font = {family: t.font, size: t.size}; Chart.defaults.color = t.dark ? '#ddd' : '#333';
      const many = t.series.length > 1 || t.kind === 'pie';
      const options = {maintainAspectRatio: false, indexAxis: t.lying ? 'y' : 'x', plugins: {
        title: {display: !!t.title, text: t.title, font: {size: t.head * t.size}}, legend: {display: many, position: t.left ? 'right' : 'bottom'}}};
      const axis = (on, text) => ({title: {display: !!text, text}, grid: {color: t.dark ? '#555' : '#ddd', display: t.grid},
        ...(on ? {ticks: {maxTicksLimit: t.ticks, callback: FORMS[t.form]}} : {})});
      if (t.kind !== 'pie') {
        options.scales = t.lying ? {y: axis(0, t.label_axis), x: axis(1, t.value_axis)}
                                 : {x: axis(0, t.label_axis), y: axis(1, t.value_axis)};
        options.scales[t.lying ? 'x' : 'y'].beginAtZero = t.kind === 'bar';
        if (t.turn && !t.lying) options.scales.x.ticks = {autoSkip: false, minRotation: Math.abs(t.turn), maxRotation: Math.abs(t.turn)};
      }
      const sets = t.series.map((s, i) => ({label: s.name, data: s.values, tension: t.smooth ? 0.4 : 0,
        backgroundColor: t.kind === 'pie' ? t.colours : t.colours[i], borderColor: t.kind === 'pie' ? '#fff' : t.colours[i],
        showLine: t.kind !== 'scatter', categoryPercentage: 1 - t.gap, pointRadius: t.kind === 'scatter' ? 5 : 3}));
      const c = new Chart(canvas, {type: t.kind === 'pie' ? (t.hole ? 'doughnut' : 'pie') : t.kind === 'bar' ? 'bar' : 'line',
        data: {labels: t.labels, datasets: sets}, options});
      each(t, (s, i, n, j) => {
        const b = c.getDatasetMeta(i).data[j], {x, y, base, width, height} = b;
        if (t.kind === 'pie') return around(b.getCenterPoint().x, b.getCenterPoint().y);
        if (t.kind !== 'bar') return around(x, y);
        return t.lying ? [base, y - height / 2, x, y + height / 2] : [x - width / 2, y, x + width / 2, base];
      });
    },
  billboard: t => {
      const pie = t.kind === 'pie', columns = pie ? t.labels.map((n, i) => [n, t.series[0].values[i]])
        : t.series.map(s => [s.name, ...s.values]);
      const colors = {}; columns.forEach((c, i) => colors[c[0]] = t.colours[i % t.colours.length]);
      bb.generate({bindto: '#c', size: {width: t.width, height: t.height}, transition: {duration: 0},
        title: {text: t.title}, data: {columns, colors, labels: !pie && t.numbers,
          type: pie ? (t.hole ? 'donut' : 'pie') : t.kind === 'line' && t.smooth ? 'spline' : t.kind},
        legend: {show: pie || t.series.length > 1, position: t.left ? 'right' : 'bottom'},
        bar: {width: {ratio: 1 - t.gap}}, grid: {y: {show: t.grid && !pie}},
        pie: {label: {format: (v, r) => t.numbers ? v : Math.round(r * 100) + '%'}},
        donut: {label: {format: (v, r) => t.numbers ? v : Math.round(r * 100) + '%'}},
        axis: pie ? {} : {rotated: t.lying, x: {type: 'category', categories: t.labels, label: t.label_axis,
            tick: t.turn && !t.lying ? {rotate: t.turn, multiline: false} : {}},
                          y: {label: t.value_axis, tick: {format: FORMS[t.form], culling: {max: t.ticks}}, min: t.kind === 'bar' ? 0 : undefined, padding: {bottom: 0}}}});
      each(t, (s, i, n, j) => {
        const marks = [...document.querySelectorAll(pie ? '.bb-chart-arc text' : t.kind === 'bar' ? '.bb-bar' : '.bb-circle')];
        const own = marks.find(({__data__: d}) => pie ? d.data.id === n : d.id === s.name && d.index === j);
        return corners(own.getBoundingClientRect());
      });
    },
  plotly: t => {
      const pie = t.kind === 'pie';
      const data = pie ? [{type: 'pie', labels: t.labels, values: t.series[0].values, hole: t.hole ? 0.45 : 0, sort: false,
          textinfo: t.numbers ? 'label+value' : 'label+percent', marker: {colors: t.colours}}]
        : t.series.map((s, i) => ({type: t.kind === 'bar' ? 'bar' : 'scatter', mode: t.kind === 'scatter' ? 'markers' : 'lines+markers',
          name: s.name, x: t.lying ? s.values : t.labels, y: t.lying ? t.labels : s.values, orientation: t.lying ? 'h' : 'v',
          line: {shape: t.smooth ? 'spline' : 'linear'}, marker: {color: t.colours[i], size: 9},
          text: t.numbers ? s.values.map(String) : undefined, textposition: t.kind === 'bar' ? 'outside' : 'top center'}));
      const kind = {type: 'category', title: {text: t.label_axis}, automargin: true}, num = {title: {text: t.value_axis}, automargin: true};
      Plotly.newPlot('c', data, {title: {text: t.title}, width: t.width, height: t.height, xaxis: t.lying ? num : kind,
        yaxis: t.lying ? kind : num, showlegend: pie || t.series.length > 1, barmode: 'group',
        paper_bgcolor: t.dark ? '#222' : '#fff', plot_bgcolor: t.dark ? '#222' : '#eef', font: {color: t.dark ? '#ddd' : '#222', family: t.font, size: t.size}},
        {staticPlot: true});
    },
  vega: t => {
      const values = t.series.flatMap(s => t.labels.map((n, i) => ({label: n, value: s.values[i], series: s.name})));
      const cat = {field: 'label', type: 'nominal', sort: null, title: t.label_axis || null};
      const num = {field: 'value', type: 'quantitative', title: t.value_axis || null};
      const many = t.series.length > 1, scheme = {range: t.colours};
      let spec = {width: t.width, height: t.height, autosize: {type: 'fit', contains: 'padding'}, title: t.title, data: {values},
        background: t.dark ? '#222' : '#fff',
        config: {font: t.font}};
      const ink = t.dark ? '#ddd' : '#222', text = {labelColor: ink, titleColor: ink, labelFontSize: t.size, titleFontSize: t.size};
      Object.assign(spec.config, {axis: text, legend: text, title: {color: ink, fontSize: 1.3 * t.size}});
      if (t.kind === 'pie') {
        spec.mark = {type: 'arc', innerRadius: t.hole ? 40 : 0};
        spec.encoding = {theta: num, color: {...cat, scale: scheme}, order: {field: 'index'}};
      } else {
        spec.mark = t.kind === 'bar' ? 'bar' : t.kind === 'line' ? {type: 'line', point: true} : {type: 'point', filled: true, size: 80};
        spec.encoding = t.lying ? {y: cat, x: num} : {x: cat, y: num};
        if (many) {
          spec.encoding.color = {field: 'series', type: 'nominal', sort: null, title: null, scale: scheme};
          if (t.kind === 'bar') spec.encoding[t.lying ? 'yOffset' : 'xOffset'] = {field: 'series', sort: null};
        } else spec.encoding.color = {value: t.colours[0]};
      }
      return vegaEmbed('#c', spec, {actions: false, renderer: 'canvas'}).then(() => true);
    },
};
