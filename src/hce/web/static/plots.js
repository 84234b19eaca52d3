// Load plotly when the first chart is drawn, and give it the page's colors.

let loading = null;

export function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/static/plotly.js";
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => { loading = null; reject(new Error("the chart library could not be loaded; reload the page")); };
    document.head.append(script);
  });
  return loading;
}

export const config = { displayModeBar: false, responsive: true, displaylogo: false };

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

export function font() {
  return { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") };
}

// The part of a layout that all charts share.
export const frame = () => ({ paper_bgcolor: "rgba(0,0,0,0)", font: font(), hoverlabel: { font: font(), bgcolor: colour("card"), bordercolor: colour("line") } });

// Plotly interprets some HTML, so texts of documents are escaped first.
export function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

export function onTheme(redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

// The color of a branch of the tree, by its rank in size among all branches.
const HUES = [174, 214, 262, 330, 14, 38, 92, 146, 196, 238, 296, 352];
export const branchHue = (place) => HUES[place % HUES.length];
