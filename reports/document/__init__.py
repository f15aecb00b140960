"""One structure of sections, and its forms: Markdown, HTML, PDF, JSON."""
