/** The client's version: here, and in package.json. */
export const VERSION = "0.1.0";
