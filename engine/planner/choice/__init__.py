"""Choice of a configuration: enumeration, prediction, ranking, and launcher files."""
