"""Lay the site's files out as in the repository, so that links work in both, and complete its HTML."""

import html
import pathlib
import re
import urllib.parse

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parent.parent
PAGES = "*.md", "docs/*.md", "docs/site.*", "docs/reference/*.md", "benchmarks/**/*.md"
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
IMAGE = re.compile(r'<img alt="([^"]*)" src="([^"]*\.svg)"[^>]*>')


def on_config(config):
    """Link to the repository, if setup.py knows its address."""
    config.repo_url = re.search(r'^REPOSITORY = "(.*?)"', (ROOT / "setup.py").read_text(), re.M)[1] or None
    config.repo_name = config.repo_url and config.site_name
    return config


def on_files(files, config):
    """Replace the files of docs/ by all pages of the repository and the files that these link to."""
    pages = [path for pattern in PAGES for path in ROOT.glob(pattern)]
    linked = {
        (page.parent / link).resolve()
        for page in pages
        if page.suffix == ".md"
        for link in LINK.findall(page.read_text())
    }
    theme = [file for file in files if not file.abs_src_path.startswith(config.docs_dir)]
    return Files(theme + [file_of(path, config) for path in sorted({*pages, *linked}) if path.is_file()])


def file_of(path: pathlib.Path, config) -> File:
    file = File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
    file.dest_uri = file.dest_uri.removeprefix("docs/")  # docs/layer.md is the page /layer/
    return file


def on_page_content(content, page, config, files):
    """Replace each SVG image by its drawing: `currentColor` in it is then the color of the page's text.

    An empty cell in a table's first row is no header of its column.
    """
    drawings = {file.url: pathlib.Path(file.abs_src_path) for file in files if file.url.endswith(".svg")}

    def inline(image: re.Match) -> str:
        alt, source = image.groups()
        return drawing(drawings[urllib.parse.urljoin(page.url, source)], html.unescape(alt))

    return IMAGE.sub(inline, content).replace("<th></th>", "<td></td>")


def drawing(path: pathlib.Path, name: str) -> str:
    """Return the <svg> element of a file, with a name for screen readers.

    Ids and styles of several drawings share a page: benchmarks/plots.py writes them for that.
    """
    text = path.read_text().replace(' role="img"', "", 1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") + len("<svg") :], flags=re.S)
    return f'<svg role="img" aria-label="{html.escape(name)}"{text}'


def on_post_page(output, page, config):
    """Name the search dialog, and the menu of a group whose title is a link, for screen readers.

    A branch of the table of contents is a landmark with the name of its heading, which a page may repeat.
    """
    output = re.sub(r'<nav class="md-nav" aria-label="[^"]*">', '<nav class="md-nav" role="none">', output)
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)
    output = re.sub(r'aria-labelledby="(__nav_\w+?)_label"', r'aria-labelledby="\1_title"', output)
    return re.sub(r'class="md-nav__title" for="(__nav_\w+)"', r'\g<0> id="\1_title"', output)
