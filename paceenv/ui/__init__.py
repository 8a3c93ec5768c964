"""What commands show and read: tables, JSON, figures, HTML pages, timelines, YAML config files."""
