"""Lay the site's files out as in the repository, so that relative links work in both."""

import pathlib
import re

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parent.parent
PAGES = "*.md", "docs/*.md", "docs/*.css", "docs/reference/*.md", "benchmarks/*.md", "benchmarks/figures/*.md"
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def on_files(files, config):
    """Replace the files of docs/ by all pages of the repository and the files that these link to."""
    pages = [path for pattern in PAGES for path in ROOT.glob(pattern)]
    linked = {(page.parent / link).resolve() for page in pages for link in LINK.findall(page.read_text())}
    theme = [file for file in files if not file.abs_src_path.startswith(config.docs_dir)]
    return Files(theme + [file_of(path, config) for path in sorted({*pages, *linked}) if path.is_file()])


def file_of(path: pathlib.Path, config) -> File:
    file = File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
    file.dest_uri = file.dest_uri.removeprefix("docs/")  # docs/layer.md is the page /layer/
    return file
