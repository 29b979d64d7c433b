/** Targets: what the caller names servers by. */
import { InvalidRequestError } from "../errors.js";
import { isLoopback } from "../connection.js";

export const DEFAULT_PORT = 50051;
export const DIRECTORY = "directory:";
const DNS = "dns:";

/** One server. */
export interface Target {
  host: string;
  port: number;
  path?: string;
}

/** Reads HOST, HOST:PORT, [IPV6]:PORT or unix:PATH. Throws InvalidRequestError. */
export function toTarget(target: string): Target {
  if (typeof target !== "string" || target === "")
    throw new InvalidRequestError("target: must be a text like HOST:PORT");
  if (/^https?:/i.test(target)) {
    throw new InvalidRequestError(
      `target: ${target} is a web address; gRPC takes HOST:PORT, with the option tls for https. ` +
        "The client of kestrel-client/web takes the address of the HTTP port",
    );
  }
  if (target.startsWith("unix:")) {
    if (process.platform === "win32") throw new InvalidRequestError("target: unix: needs a Unix system");
    const path = target.slice("unix:".length).replace(/^\/\/(?=\/)/, "");
    if (!path) throw new InvalidRequestError("target: unix: needs a path");
    return { host: "localhost", port: DEFAULT_PORT, path };
  }
  const found = /^(\[[0-9a-f:.]+\]|[^:/[\]@?#\s,]+)(?::(\d{1,5}))?$/i.exec(target);
  if (found === null && /^[0-9a-f:.]+$/i.test(target)) return { host: `[${target}]`, port: DEFAULT_PORT };
  const port = Number(found?.[2] ?? DEFAULT_PORT);
  if (found === null || port < 1 || port > 65535) {
    throw new InvalidRequestError(
      `target: ${target} must be HOST:PORT, [IPV6]:PORT or unix:PATH, with a port to 65535`,
    );
  }
  return { host: found[1] as string, port };
}

/** The address of a server, with its port. */
export function addressOf({ host, port, path }: Target): string {
  return path === undefined ? `${host}:${port}` : `unix:${path}`;
}

/** Whether a server is on this machine. */
export function isLocal({ host, path }: Target): boolean {
  return path !== undefined || isLoopback(host);
}

/** Where the addresses of several servers come from. */
export type Listed =
  | { kind: "list"; addresses: readonly string[] }
  | { kind: "directory"; source: string }
  | { kind: "dns"; name: Target };

/** What stands for several servers; undefined if the target is one server. Throws InvalidRequestError. */
export function toListed(target: string | readonly string[]): Listed | undefined {
  if (typeof target !== "string") {
    if (!Array.isArray(target) || target.length === 0) {
      throw new InvalidRequestError("target: must be a text like HOST:PORT, or a list of such texts");
    }
    return { kind: "list", addresses: [...new Set(target.map((each) => addressOf(toTarget(each))))] };
  }
  if (target.startsWith(DIRECTORY)) {
    const source = target.slice(DIRECTORY.length);
    if (source) return { kind: "directory", source };
    throw new InvalidRequestError(
      `target: ${DIRECTORY} needs a file or an http(s) address, like ${DIRECTORY}/run/kestrel/servers`,
    );
  }
  if (target.startsWith(DNS)) {
    return { kind: "dns", name: toTarget(target.slice(DNS.length).replace(/^\/\/\//, "")) };
  }
  return target.includes(",") ? toListed(target.split(",").map((each) => each.trim())) : undefined;
}
