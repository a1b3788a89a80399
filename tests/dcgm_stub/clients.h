/* What clients.c gives to the functions of the API. */
#ifndef CLIENTS_H
#define CLIENTS_H

#include <stdbool.h>

#include "vendor.h"

struct group {
    group_t id; /* 0: a free place */
    uint64_t client;
    unsigned count;
    char name[TEXT];
    struct entity entity[MAX_GROUP_ENTITIES];
};
struct field_group {
    group_t id;
    uint64_t client;
    unsigned count;
    char name[TEXT];
    uint16_t field[MAX_GROUP_FIELDS];
};

uint64_t connect_client(bool persist);
bool client_alive(uint64_t id);
void disconnect_client(uint64_t id);
unsigned client_count(void);
void embed(bool on);
bool embedded_runs(void);

struct group *group_found(group_t id);
struct group *group_at(int i);
status_t group_create(uint64_t owner, int type, const char *name, group_t *id);
status_t group_destroy(group_t id);
status_t group_add(group_t id, struct entity entity);
status_t group_remove(group_t id, struct entity entity);
unsigned group_count(void);
struct field_group *field_group_found(group_t id);
struct field_group *field_group_at(int i);
status_t field_group_create(uint64_t owner, const char *name, const uint16_t *fields, int n, group_t *id);
status_t field_group_destroy(group_t id);
unsigned field_group_count(void);

/* What a group stands for just now; `to` has room for MAX_GROUP_ENTITIES or MAX_GROUP_FIELDS. */
status_t group_entities(group_t id, struct entity *to, unsigned *n);
status_t group_fields(group_t id, uint16_t *to, unsigned *n);

/* All clients' connections up to the one of that number are broken; or the engine is another one. */
void clients_drop(uint64_t up_to);
void clients_wipe(bool embedded_too);

#endif
