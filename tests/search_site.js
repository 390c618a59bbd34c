// Search a built site as its pages do, by the site's own search worker: `node search_site.js SITE TERM...` prints, as JSON,
// the locations that are found for each term, best first.
const fs = require('fs');
const vm = require('vm');

const [site, ...terms] = process.argv.slice(2);
const workers = `${site}/assets/javascripts/workers`;
const worker = fs.readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));
const { config, docs } = JSON.parse(fs.readFileSync(`${site}/search/search_index.json`));

const waiting = [];
let handler;
const scope = {
  addEventListener: (kind, listener) => { if (kind === 'message') handler = listener; },
  postMessage: (message) => waiting.shift()(message),
  importScripts: () => {},
  console, URL, setTimeout,
};
scope.self = scope.globalThis = scope;
vm.runInContext(fs.readFileSync(`${workers}/${worker}`, 'utf8'), vm.createContext(scope));

const SETUP = 0, QUERY = 2; // the worker's kinds of message
const send = (type, data) => new Promise((resolve) => { waiting.push(resolve); handler({ data: { type, data } }); });

(async () => {
  await send(SETUP, { config, docs, options: { suggest: false } });
  const found = {};
  for (const term of terms) {
    const { items } = (await send(QUERY, term)).data;
    found[term] = items.map(([page]) => page.location);
  }
  console.log(JSON.stringify(found));
})();
