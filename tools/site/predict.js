'use strict'
// Everything from a file becomes text, never HTML: `textContent` and `new Option`
const max_mib = 20, max_letters = 80, own_files = 'Every gpubench run and gpubench sweep writes a file records.jsonl in its folder.'
const data = JSON.parse(document.getElementById('data').textContent)
const $ = id => document.getElementById(id)
const short = x => Number(x.toPrecision(3)).toLocaleString('en-US', {maximumFractionDigits: 20})
const count = (n, what) => `${n.toLocaleString('en-US')} ${what}${n===1 ? '' : 's'}`
const unique = xs => [...new Set(xs)]

function median(xs) {
  const s = [...xs].sort((a, b) => a-b), i = s.length>>1
  return s.length%2 ? s[i] : (s[i-1]+s[i])/2
}

function element(name, props={}, ...children) {
  const o = Object.assign(document.createElement(name), props)
  o.append(...children)
  return o
}

// ---- configurations: recorded ones, and one's own

const is_usual = (name, x) => !x || x===data.settings[name].usual

function label(name, x) {
  const w = data.settings[name].wording
  if (Array.isArray(w)) return w[x ? 1 : 0]
  if (typeof w==='object') return Object.hasOwn(w, x) ? w[x] : `${x} ${name}`
  return w.replace(/\{(:,)?\}/, (_, comma) => comma ? x.toLocaleString('en-US') : x).replace(/^1 (\w+)s\b/, '1 $1')
}

function place(at, own) {
  const gpu = at.gpu && `${at.n_gpus>1 ? at.n_gpus+' × ' : ''}${at.gpu}`, cores = at.n_cores ? `, ${at.n_cores} cores` : ''
  const cpu = `CPU: ${String(at.cpu || 'unknown').replace(/\((R|TM)\)| Processor/g, '')}${cores}`
  const name = String(at.device).startsWith('cuda') ? `GPU: ${gpu || 'unknown'}${cores}` : at.device==='cpu' ?
    cpu+(gpu ? `, beside ${gpu}` : '') : `${at.device}: ${cpu}`
  return (own ? 'Yours · ' : '')+name
}

// `o`: as in the page's data; its choices are all text, but for the batch size
function configuration(o) {
  const s = {...o.settings}, words = names => names.filter(k => k in s && !is_usual(k, s[k])).map(k => label(k, s[k]))
  const apart = ['model', 'precision', 'n_devices', ...data.images]
  return {...o, is_gpu: o.at.device!=='cpu', pick: {
    place: place(o.at, o.own), model: String(s.model), images: words(data.images).join(' · ') || 'unknown images',
    how: words(Object.keys(data.settings).filter(k => !apart.includes(k))).join(' · ') || 'the defaults',
    precision: String(s.precision || data.settings.precision.usual), n_devices: String(s.n_devices || 1), bs: o.bs}}
}

const picks = {place: 'Machine', model: 'Network', images: 'Images', how: 'Other settings', precision: 'Precision', n_devices: 'Devices',
  bs: 'Batch size (images)'}
const ids = Object.keys(picks), open_ids = ['precision', 'n_devices', 'bs']  // also offer what wasn't measured here
const recorded = data.configurations.map(configuration)
let own = []
const everything = () => [...own, ...recorded]
const matches = (o, pick, but=[]) => ids.every(k => but.includes(k) || o.pick[k]===pick[k])
const find = pick => everything().find(o => matches(o, pick))

// ---- the choice

const pick = {}, locked = new Map()
let show_all = false
const key = pick => JSON.stringify(ids.map(k => pick[k]))
const orders = {bs: (a, b) => a-b, how: (a, b) => a.split(' · ').length-b.split(' · ').length}      // fewer changes first
const sorted = (k, xs) => k==='place' ? xs : xs.sort(orders[k] || ((a, b) => a.localeCompare(b, 'en', {numeric: true})))

function nearest(xs, x) {
  return typeof x==='number' ? xs.reduce((a, b) => Math.abs(Math.log(b/x))<Math.abs(Math.log(a/x)) ? b : a) : xs[0]
}

// After a change of `changed`, what comes after it stays, or becomes something that was measured
function choose(changed) {
  let left = everything()
  ids.forEach((k, i) => {
    const has = sorted(k, unique(left.map(o => o.pick[k]))), is_open = open_ids.includes(k)
    const shown = is_open ? sorted(k, unique(everything().map(o => o.pick[k]))) : has
    if (!has.includes(pick[k]) && has.length && (i>ids.indexOf(changed) || !is_open)) pick[k] = nearest(has, pick[k])
    $(k).replaceChildren(...shown.map(x => new Option(x+(has.includes(x) ? '' : ' – not measured'), x, false, x===pick[k])))
    left = left.filter(o => o.pick[k]===pick[k])
  })
  show_all = false
  show()
}

for (const k of ids) {
  const box = element('select', {id: k, onchange: e => {
    pick[k] = k==='bs' ? Number(e.target.value) : e.target.value
    choose(k)
  }})
  $('picks').append(element('div', {}, element('label', {htmlFor: k, textContent: picks[k]}), box))
}

// ---- figures: a row for each machine or batch size, all from 0

function mark(parent, name, attributes) {
  const o = document.createElementNS('http://www.w3.org/2000/svg', name)
  for (const [k,x] of Object.entries(attributes)) o.setAttribute(k, x)
  parent.append(o)
  return o
}

// The end of an axis that holds `x`, and into how many equal parts it is divided
function scale(x) {
  const unit = 10**Math.floor(Math.log10(x)), found = [[1, 4], [1.5, 3], [2, 4], [3, 3], [4, 4], [5, 2], [6, 3], [8, 4], [10, 4]]
  return found.map(([top, n]) => [top*unit, n]).find(([top]) => top>=x*.999)
}

const percent = (x, top) => `${100*x/top}%`

function dots(o, top, guess) {
  const holder = element('div', {className: 'plot', ariaHidden: 'true'}), svg = mark(holder, 'svg', {height: 26, class: o.is_gpu ? 'gpu' : 'cpu'})
  mark(svg, 'line', {class: 'base', x1: 0, x2: '100%', y1: 13, y2: 13})
  if (guess<=top) mark(svg, 'line', {class: 'line guess', x1: percent(guess, top), x2: percent(guess, top), y1: 0, y2: 26})
  if (guess>top) mark(svg, 'text', {class: 'guess', x: '100%', y: 18, 'text-anchor': 'end'}).textContent = '▶'
  for (const x of o.rates) {
    if (o.own) mark(mark(svg, 'svg', {x: percent(x, top), y: 13, overflow: 'visible'}), 'rect', {class: 'dot', x: -4.5, y: -4.5, width: 9, height: 9})
    else mark(svg, 'circle', {class: 'dot', cx: percent(x, top), cy: 13, r: 5})
  }
  const m = percent(median(o.rates), top)
  mark(svg, 'line', {class: 'median', x1: m, x2: m, y1: 2, y2: 24})
  return holder
}

function axis(top, n) {
  const holder = element('div', {className: 'plot axis'}), svg = mark(holder, 'svg', {height: 38})
  const text = (x, y, anchor, words) => { mark(svg, 'text', {x, y, 'text-anchor': anchor}).textContent = words }
  for (let i=0; i<=n; i++) {
    const x = percent(i, n)
    mark(svg, 'line', {class: 'tick', x1: x, x2: x, y1: 0, y2: 5})
    text(x, 19, i===0 ? 'start' : i===n ? 'end' : 'middle', short(top*i/n))
  }
  text('100%', 35, 'end', 'images/s')
  return element('li', {ariaHidden: 'true'}, holder)
}

// `rows`: [name, configuration or what to say instead, is it the one that was chosen, what was predicted for it]
function draw(list, rows) {
  const shown = rows.filter(o => o[1].rates), most = Math.max(...shown.flatMap(o => o[1].rates))
  const [top, n] = scale(Math.max(most, ...shown.map(o => o[3]).filter(x => x<=2*most)))
  list.replaceChildren(...rows.map(([name, o, chosen, guess]) => {
    const li = element('li', {className: chosen ? 'chosen' : ''}, element('span', {className: 'name', textContent: name}))
    if (!o.rates) li.append(element('span', {className: 'value none', textContent: o}))
    else li.append(
      element('span', {className: 'value', textContent: `${short(median(o.rates))} images/s`},
        element('span', {className: 'soft', textContent: ` · ${count(o.rates.length, 'visit')}`}),
        element('span', {className: 'unseen', textContent: `: ${o.rates.map(short).join(', ')}`})),
      dots(o, top, guess))
    return li
  }), axis(top, n))
}

// ---- what was measured

// `code` in the library's sentences
const with_code = text => text.replace(/(\d) (ms|%)/g, '$1\u00a0$2').split('`').map((o, i) => i%2 ? element('code', {textContent: o}) : o)

function compared(guess, m) {
  const words = `You predicted ${short(guess)} images/s; the median is ${short(m)} images/s. `, r = guess/m
  return words+(short(r)==='1' ? 'Your prediction is right.' : `Your prediction is ${short(r)} times the median.`)
}

function score() {
  const ratios = [...locked.values()].map(o => o.guess/o.median)
  const near = ratios.filter(o => o>=.5 && o<=2).length
  return ratios.length>1 ? ` Of your ${ratios.length} predictions, ${near} ${near===1 ? 'is' : 'are'} between half and twice the median.` : ''
}

function show() {
  const o = find(pick), guess = locked.get(key(pick))?.guess, here = everything().filter(x => matches(x, pick, ['bs']))
  $('guess').hidden = !o || guess!==undefined
  $('result').hidden = guess===undefined || !o
  if (!o) {
    const sizes = here.map(x => x.bs).sort((a, b) => a-b)
    $('state').textContent = 'Not measured. '+(sizes.length ? `With these settings, this was: batch ${sizes.join(', ')}.` :
      'No batch size was visited with these settings on this machine.')
    return
  }
  const when = o.days[0]===o.days[1] ? o.days[0] : `${o.days[0]} to ${o.days[1]}`
  $('state').textContent = `${count(o.rates.length, 'visit')} recorded (${when}).`+(guess===undefined ? '' : ` Locked: ${short(guess)} images/s.`)
  if (guess===undefined) return
  $('verdict').textContent = compared(guess, median(o.rates))+score()
  $('why').replaceChildren(...with_code(o.why))
  $('own-legend').hidden = !own.length
  const others = unique(everything().map(x => x.pick.place)).filter(x => x!==pick.place).map(x => [x, find({...pick, place: x}) || 'not measured'])
  draw($('machines'), [[pick.place, o, true, guess], ...others.filter(x => x[1].rates), ...others.filter(x => !x[1].rates)])
  const sizes = unique(everything().map(x => x.bs)).sort((a, b) => a-b), has = here.map(x => x.bs)
  const between = sizes.filter(x => x>=Math.min(...has) && x<=Math.max(...has))
  draw($('sizes'), between.map(bs => {
    const at = {...pick, bs}, x = find(at)
    return [`batch ${bs}`, !x ? 'not measured' : show_all || locked.has(key(at)) ? x : 'not predicted yet', bs===pick.bs, locked.get(key(at))?.guess]
  }))
  $('all').hidden = !has.some(bs => !locked.has(key({...pick, bs})))
  $('all').textContent = `${show_all ? 'Hide' : 'Show'} the sizes that I haven't predicted`
}

$('guess').onsubmit = e => {
  e.preventDefault()
  const guess = Number($('number').value)
  $('number').setCustomValidity(guess>0 && Number.isFinite(guess) ? '' : 'A number above 0, in images per second')
  if (!$('number').reportValidity()) return
  locked.set(key(pick), {guess, median: median(find(pick).rates)})
  $('number').value = ''
  show()
  $('seen').focus()
}
$('number').oninput = () => $('number').setCustomValidity('')
$('all').onclick = () => { show_all = !show_all; show() }

// ---- one's own records

const plain = x => typeof x==='string' ? x.slice(0, max_letters) : typeof x==='boolean' || Number.isFinite(x) ? x : null
const is_record = o => o!==null && typeof o==='object' && !Array.isArray(o) && 'schema' in o

function parse(line) {
  try { return JSON.parse(line) } catch { return null }
}

function own_reason(rows) {
  const ms = name => rows.map(o => o[name]).filter(x => Number.isFinite(x) && x>=0)
  const middle = name => ms(name).length ? median(ms(name)) : 0, step_ms = middle('step_ms')
  const parts = data.parts.map(o => ({...o, ms: o.phases.map(middle).reduce((a, b) => a+b)})).map(o => ({...o, share: o.ms/step_ms}))
  const most = parts.sort((a, b) => (b.share>=b.least)-(a.share>=a.least) || b.share-a.share)[0]
  if (!(step_ms>0 && most.ms>0)) return 'The parts of its steps were not recorded.'
  return `${most.share<most.least ? 'No part stands out: ' : ''}${short(100*most.share)} % of a step is ${most.words} (${short(most.ms)} ms). \`gpubench report\` shows what shortens it.`
}

// The records of a file, and how many lines are none, of another version, failed, or lack something
function read_lines(text) {
  const found = [], left = {none: 0, version: 0, failed: 0, lacking: 0}
  for (const line of text.split('\n')) {
    if (!line.trim()) continue
    const o = line.length>2**20 ? null : parse(line)
    if (!is_record(o)) left.none++
    else if (o.schema!==data.schema) left.version++
    else if (typeof o.status==='string' && o.status!=='ok') left.failed++
    else if (typeof o.model!=='string' || !Number.isInteger(o.bs) || o.bs<1 || !Number.isFinite(o.images_per_s) || o.images_per_s<=0 ||
      typeof o.device!=='string') left.lacking++
    else found.push(o)
  }
  return [found, left]
}

function grouped(rows) {
  const groups = new Map()
  for (const row of rows) {
    const settings = Object.fromEntries(Object.keys(data.settings).map(k => [k, plain(row[k])]).filter(([k, x]) => !is_usual(k, x)))
    const at = Object.fromEntries(['device', 'gpu', 'n_gpus', 'cpu', 'n_cores'].map(k => [k, plain(row[k])]))
    const k = JSON.stringify([settings, at, row.bs])
    groups.set(k, [...groups.get(k) || [], {row, settings, at}])
  }
  return [...groups.values()].map(all => {
    const days = all.map(o => typeof o.row.time_utc==='string' ? o.row.time_utc.slice(0, 10) : 'no date').sort()
    return configuration({own: true, at: all[0].at, settings: all[0].settings, bs: all[0].row.bs, rates: all.map(o => o.row.images_per_s),
      days: [days[0], days[days.length-1]], why: own_reason(all.map(o => o.row))})
  })
}

const reasons = {none: 'not a record', failed: 'failed', lacking: 'without a network, batch size, device or images per second',
  version: `of another version, not schema ${data.schema}`}

async function take(files) {
  const said = [], rows = []
  for (const file of files) {
    if (file.size>max_mib*2**20) {
      said.push(`${file.name} has ${Math.round(file.size/2**20)} MiB; this page reads at most ${max_mib}. Choose the records of one run.`)
      continue
    }
    const text = await file.text().catch(() => null)
    if (text===null) { said.push(`${file.name} can't be read. Choose a file, not a folder.`); continue }
    const [found, left] = read_lines(text)
    const what = Object.keys(left).filter(k => left[k]).map(k => `${reasons[k]} (${count(left[k], 'line')})`).join('; ')
    if (!found.length) said.push(`${file.name} has no visit that can be shown${what && `: ${what}`}. ${own_files}`)
    else said.push(`${file.name}: ${count(found.length, 'visit')} read${what && `; left out: ${what}`}.`)
    rows.push(...found)
  }
  if (rows.length) {
    own = grouped(rows)
    said.push('Your machine is now in the list of machines and in the figures.')
    if (!own.some(o => matches(o, pick, ['place']))) {
      Object.assign(pick, own.reduce((a, b) => n_places(b)>n_places(a) ? b : a).pick)
      said.push('The choice at the top is now one of your trainings.')
    }
    choose('bs')
  }
  $('read').textContent = said.join(' ')
}

$('file').onchange = e => take([...e.target.files])
for (const name of ['dragover', 'drop', 'dragleave']) document.addEventListener(name, e => {
  if (name!=='dragleave') e.preventDefault()
  $('drop').classList.toggle('over', name==='dragover')
  if (name==='drop' && e.dataTransfer.files.length) take([...e.dataTransfer.files])
})

// ---- the start: where most can be compared

const n_places = o => recorded.filter(x => matches(x, o.pick, ['place'])).length
const n_alike = o => recorded.filter(x => matches(x, o.pick, ['place', 'bs'])).length
Object.assign(pick, recorded.reduce((a, b) => ([n_alike(b)-n_alike(a), b.is_gpu-a.is_gpu, b.rates.length-a.rates.length].find(x => x)>0 ? b : a)).pick)
$('source').textContent = `${count(data.n_visits, 'visit')} from the repository's records.`
choose('bs')
