"""From results.json to what people read: statistics, tables, figures, pages."""
