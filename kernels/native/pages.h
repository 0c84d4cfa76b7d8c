// Where the tokens of a step stand: their requests, positions and slots.
#pragma once

#include <cstdint>

struct Span {
  int64_t row, position, count;  // packed rows from `row` on stand at `position` and on
  int64_t table;                 // pages[table] is the request's first page
};

struct Tables {
  const Span* spans;
  int64_t count;
  const int64_t* pages;  // page tables of the full pool, one behind the other
  const int64_t* map;    // full page -> page of the pool that is meant, or null: the full pool itself
  int64_t page_size;

  int64_t slot(const Span& span, int64_t position) const {
    int64_t number = position / page_size, page = pages[span.table + number];
    return (map == nullptr ? page : map[page]) * page_size + position - number * page_size;
  }

  int64_t page_end(int64_t position) const { return position / page_size * page_size + page_size; }
};
