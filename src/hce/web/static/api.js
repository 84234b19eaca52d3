// Requests: JSON in, JSON or bytes out, errors as one sentence. The token is kept until the tab is closed.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem("hce-token") || "",
  set: (value) => sessionStorage.setItem("hce-token", value),
};

async function respond(path, options = {}) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server does not answer; is hce serve still running?");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new ApiError(response.status, answer.error || `the server answered ${response.status}`);
}

const request = async (path, options) => (await respond(path, options)).json();

export const getBytes = async (path) => (await respond(path)).arrayBuffer();

export function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) query.append(name, each);
  }
  return request(`${path}?${query}`, { signal });
}

function writing() {
  return token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
}

export function post(path, body) {
  const headers = { "Content-Type": "application/json", ...writing() };
  return request(path, { method: "POST", headers, body: JSON.stringify(body) });
}

export function remove(path) {
  return request(path, { method: "DELETE", headers: writing() });
}
