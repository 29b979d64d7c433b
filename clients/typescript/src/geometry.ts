/** Points and boxes: fractions of the upright image, from (0, 0) at its upper left corner to (1, 1). */
import { InvalidRequestError } from "./errors.js";

export interface PointInput {
  x: number;
  y: number;
}

export interface BoxInput {
  xMin: number;
  yMin: number;
  xMax: number;
  yMax: number;
}

/** A place in the image that a question or a name refers to. */
export type SpatialRef = PointInput | BoxInput;

/** How `point` and `detect` cut an image into tiles: as "2x3" (rows by columns), or with all settings. */
export type TilesInput =
  `${number}x${number}` | { rows: number; columns: number; overlap?: number; tilesOnly?: boolean };

/** Pixels of a point or the edges of a box, in an image of `size`. */
export function toPixels(place: PointInput, size: { width: number; height: number }): { x: number; y: number };
export function toPixels(
  place: BoxInput,
  size: { width: number; height: number },
): { left: number; top: number; right: number; bottom: number };
export function toPixels(place: SpatialRef, { width, height }: { width: number; height: number }) {
  if ("x" in place) {
    const inside = (fraction: number, length: number) =>
      Math.min(Math.max(Math.floor(fraction * length), 0), length - 1);
    return { x: inside(place.x, width), y: inside(place.y, height) };
  }
  return {
    left: Math.round(place.xMin * width),
    top: Math.round(place.yMin * height),
    right: Math.round(place.xMax * width),
    bottom: Math.round(place.yMax * height),
  };
}

/** The init of a SpatialRef message. Throws InvalidRequestError. The server checks the ranges. */
export function toSpatialRef(place: SpatialRef, index: number, name = "spatialRefs") {
  if (isBox(place)) return { ref: { case: "box" as const, value: toBox(place) } };
  const point = place as Partial<PointInput> | null | undefined;
  if (isNumber(point?.x) && isNumber(point.y)) {
    return { ref: { case: "point" as const, value: { x: point.x, y: point.y } } };
  }
  throw new InvalidRequestError(`${name}[${index}]: needs the numbers x and y, or xMin, yMin, xMax and yMax`);
}

/** The inits of Point or Box messages: one place or several. Throws InvalidRequestError. */
export function toPlaces(name: string, kind: "point" | "box", given: SpatialRef | readonly SpatialRef[] = []) {
  const all = Array.isArray(given) ? (given as readonly SpatialRef[]) : [given as SpatialRef];
  return all.map((place, index) => {
    const { ref } = toSpatialRef(place, index, name);
    if (ref.case !== kind) throw new InvalidRequestError(`${name}[${index}]: is not a ${kind}`);
    return ref.value;
  });
}

/** The init of a region. Throws InvalidRequestError. */
export function toRegion(region: BoxInput) {
  if (!isBox(region)) throw new InvalidRequestError("region: needs the numbers xMin, yMin, xMax and yMax");
  return toBox(region);
}

/** The init of a Tiles message. Throws InvalidRequestError. */
export function toTiles(tiles: TilesInput) {
  if (typeof tiles !== "string") return { ...tiles };
  const found = /^(\d{1,4})x(\d{1,4})$/.exec(tiles);
  if (found === null)
    throw new InvalidRequestError(`tiles=${JSON.stringify(tiles)}: must be like "2x3" (rows x columns)`);
  return { rows: Number(found[1]), columns: Number(found[2]) };
}

function toBox({ xMin, yMin, xMax, yMax }: BoxInput): BoxInput {
  return { xMin, yMin, xMax, yMax };
}

function isBox(place: object | null | undefined): place is BoxInput {
  const box = place as Partial<BoxInput> | null | undefined;
  return [box?.xMin, box?.yMin, box?.xMax, box?.yMax].every(isNumber);
}

function isNumber(value: unknown): value is number {
  return typeof value === "number" && Number.isFinite(value);
}
